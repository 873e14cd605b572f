"""`CatLlamaConfig`: Llama's configuration and what convolution-augmented attention adds to it."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers.models.llama.configuration_llama import LlamaConfig

from cat_lm.core.numbers import HEADS, HIDDEN_SIZE, NORM_EPSILON
from cat_lm.model.attention.settings import AttentionSettings, refuse
from cat_lm.model.hf.settings import (
    NUMBERS,
    SWITCHES,
    WHOLE_NUMBERS,
    KnownKeys,
    check_numbers,
    check_shape,
)
from cat_lm.model.rope_scaling import (
    check_rope_number,
    check_rope_numbers,
    check_rope_parameters,
)
from cat_lm.model.rules import (
    given_once_problems,
    key_value_problems,
    part_rotation_problems,
    temperature_problems,
    unmixed_problems,
    whole_rotation_problems,
)


@strict
class CatLlamaConfig(AttentionSettings, KnownKeys, LlamaConfig):
    r"""Configuration of a convolution-augmented Llama model.

    The fields of the convolutions, of positions and of the temperature mean what they mean in
    `CatConfig`. With `num_key_value_heads` below `num_attention_heads` (grouped queries), keys and
    values are convolved by their own heads' filters, and a multi-head convolution mixes the heads
    of its stream.

    conv_mixing (`str`, defaults to `"embeddings"`): the only one of this family. Attention maps of
        `num_attention_heads` heads would be mixed with values of fewer.
    rope_theta (`float`, defaults to 10,000): stored as `rope_parameters["rope_theta"]`. All
        channels of a head are rotated.

    `initializer_range` of Llama has no effect: see `cat_lm.model.hf.initialization`.
    Wrong values raise a `ValueError` that says what is supported.
    """

    model_type = "cat_llama"
    # The projections' biases are added after the convolution.
    convolved_names: ClassVar[dict[str, str]] = {r"\.([qkv])_proj\.bias$": r".convolution.\1_bias"}
    # Tensor parallelism would have to split the filters along with the heads, and pipeline stages
    # would have to pass documents and padding on.
    base_model_tp_plan = base_model_pp_plan = None

    def __post_init__(self, **kwargs: Any) -> None:
        check_fields(self)
        _check_rope_names(kwargs)
        refuse(given_once_problems(self.rope_parameters, kwargs))
        self.check_attention_settings()
        refuse(unmixed_problems(self))
        check_rope_parameters(self.rope_parameters, kwargs.get("rope_scaling"))
        super().__post_init__(**kwargs)
        check_rope_numbers(self.rope_parameters)
        refuse(part_rotation_problems(self))
        refuse([*temperature_problems(self), *whole_rotation_problems(self)])


_NUMBERS = NUMBERS | {"rms_norm_eps": NORM_EPSILON}
_SWITCHES = ("mlp_bias", *SWITCHES)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Check what a Llama or CAT-Llama `config.json` says, before a configuration is made of it.

    Raises:
        ValueError: as `check_fields`.
    """
    # Both follow from the others where they are not given.
    defaults = CatLlamaConfig().to_dict() | {"num_key_value_heads": None, "head_dim": None}
    check_fields(SimpleNamespace(**defaults | dict(settings)))
    _check_rope_names(settings)


def _check_rope_names(values: Mapping[str, Any]) -> None:
    if values.get("rope_theta") is not None:
        check_rope_number("rope_theta", values["rope_theta"])


def check_fields(config: LlamaConfig | SimpleNamespace) -> None:
    """Check types and ranges of what a Llama or CAT-Llama model is built from.

    Raises:
        ValueError: naming the field, its value and what would be right.
    """
    given = {
        name: allowed
        for name, allowed in (("num_key_value_heads", HEADS), ("head_dim", HIDDEN_SIZE))
        if getattr(config, name) is not None
    }
    check_numbers(config, WHOLE_NUMBERS | given, whole=True)
    check_numbers(config, _NUMBERS, whole=False)
    check_shape(config, _SWITCHES)
    refuse(key_value_problems(config))
    if config.rope_parameters:
        check_rope_numbers(config.rope_parameters)
        refuse(part_rotation_problems(config))
