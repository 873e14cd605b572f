"""`CatMambaConfig` and `CatMamba2Config`: the library's, for the models of this project."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.models.mamba.configuration_mamba import MambaConfig
from transformers.models.mamba2.configuration_mamba2 import Mamba2Config

from cat_lm.core import numbers
from cat_lm.model.attention.settings import check_choice, refuse
from cat_lm.model.hf.settings import (
    RecurrentSettings,
    check_numbers,
    check_switches,
    check_tokens,
)
from cat_lm.model.recurrent_rules import limit_problems, state_head_problems, step_problems

_WHOLE_NUMBERS = {
    "hidden_size": numbers.HIDDEN_SIZE,
    "num_hidden_layers": numbers.LAYERS,
    "vocab_size": numbers.VOCABULARY,
    "state_size": numbers.STATE_SIZE,
    "conv_kernel": numbers.WINDOW,
    "expand": numbers.EXPANSION.at_least(1),
}
_NUMBERS = {
    "layer_norm_epsilon": numbers.NORM_EPSILON,
    "initializer_range": numbers.NORM_EPSILON,
    "time_step_min": numbers.TIME_STEP,
    "time_step_max": numbers.TIME_STEP,
    "time_step_floor": numbers.TIME_STEP,
}
_SWITCHES = (
    *("use_bias", "use_conv_bias", "residual_in_fp32", "rescale_prenorm_residual"),
    *("tie_word_embeddings", "use_cache"),
)
_HEADS = {"num_heads": numbers.HEADS, "head_dim": numbers.HIDDEN_SIZE, "n_groups": numbers.HEADS}


@strict
class CatMambaConfig(RecurrentSettings, MambaConfig):
    r"""Configuration of a Mamba model of this project; the fields are those of `MambaConfig`.

    max_position_embeddings (`int`): tokens of a training sequence.
    initializer_range (`float`): the standard deviation of embeddings and of the projections that
        have no start of their own; the library's default of 0.1 is not the paper's.
    use_mambapy, use_associative_scan, time_step_scale, time_step_init_scheme: of the library's
        class alone.

    Wrong values raise a `ValueError` that says what is supported.
    """

    model_type = "cat_mamba"

    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False

    @classmethod
    def other_keys(cls) -> Collection[str]:
        """Return the attribute that the library's class computes and writes."""
        return ("intermediate_size",)

    def __post_init__(self, **kwargs: Any) -> None:
        check_numbers(self, {"max_position_embeddings": numbers.CONTEXT}, whole=True)
        check_fields(self)
        super().__post_init__(**kwargs)


@strict
class CatMamba2Config(RecurrentSettings, Mamba2Config):
    r"""Configuration of a Mamba-2 model of this project; the fields are those of `Mamba2Config`.

    max_position_embeddings (`int`), initializer_range (`float`): as of `CatMambaConfig`.
    chunk_size, time_step_rank: of the library's class alone.

    Wrong values raise a `ValueError` that says what is supported.
    """

    model_type = "cat_mamba2"

    max_position_embeddings: int = 2048
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        check_numbers(self, {"max_position_embeddings": numbers.CONTEXT}, whole=True)
        check_head_fields(self)
        super().__post_init__(**kwargs)
        self.time_step_limit = tuple(self.time_step_limit)

    @property
    def intermediate_size(self) -> int:
        """The channels inside a layer."""
        return self.expand * self.hidden_size


def check_settings(
    settings: Mapping[str, Any], kind: type[CatMambaConfig | CatMamba2Config]
) -> None:
    """Check what a `config.json` says, the library's or ours, before a configuration is made of it.

    Raises:
        ValueError: as `check_fields`.
    """
    values = kind().to_dict() | dict(settings)
    if kind is CatMambaConfig:
        return check_fields(SimpleNamespace(**values))
    if isinstance(limit := values["time_step_limit"], list):
        # JSON has no infinity; this is what transformers writes.
        infinity = {"__float__": "Infinity"}
        values["time_step_limit"] = [float("inf") if n == infinity else n for n in limit]
    return check_head_fields(SimpleNamespace(**values))


def check_fields(config: CatMambaConfig | SimpleNamespace) -> None:
    """Check types and ranges of what a Mamba model is built from.

    Raises:
        ValueError: naming the field, its value and what would be right.
    """
    _check_shared(config)
    if config.time_step_rank != "auto":
        check_numbers(config, {"time_step_rank": numbers.HIDDEN_SIZE}, whole=True)


def check_head_fields(config: CatMamba2Config | SimpleNamespace) -> None:
    """Check what a Mamba-2 model is built from, as `check_fields`."""
    _check_shared(config)
    check_numbers(config, _HEADS, whole=True)
    refuse([*state_head_problems(config, config.num_heads), *limit_problems(config)])


def _check_shared(config: Any) -> None:
    check_numbers(config, _WHOLE_NUMBERS, whole=True)
    check_numbers(config, _NUMBERS, whole=False)
    check_switches(config, _SWITCHES)
    check_tokens(config)
    check_choice("hidden_act", config.hidden_act, ("silu",))
    refuse(step_problems(config))
