"""`CatConfig`: GPT-NeoX's configuration and what convolution-augmented attention adds to it."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.models.gpt_neox.configuration_gpt_neox import GPTNeoXConfig

CONV_TYPES = ("none", "head", "multihead")
CONV_INITS = ("identity", "uniform")
POSITION_EMBEDDINGS = ("rope", "none")
STREAMS = "qkv"


@strict
class CatConfig(GPTNeoXConfig):
    r"""Configuration of a convolution-augmented GPT-NeoX model.

    conv_type (`str`, defaults to `"head"`): `"none"` is plain GPT-NeoX (Pythia); `"head"` convolves
        each head with one causal filter, shared by the channels of the head; `"multihead"` mixes
        heads, with one filter for each pair of them.
    conv_window (`int`, defaults to 21): W, the number of taps of a filter; at least 1.
    conv_streams (`str`, defaults to `"qkv"`): which of queries, keys and values are convolved.
    conv_init (`str`, defaults to `"identity"`): `"identity"` starts as the model without
        convolutions, `"uniform"` draws the taps from ±1/sqrt(W), for multihead ±1/sqrt(W H).
    position_embedding (`str`, defaults to `"rope"`): rotary positions, or `"none"` for none.
    rotary_pct (`float`, defaults to 0.25): the part of a head's channels that is rotated. Stored as
        `rope_parameters["partial_rotary_factor"]`.

    `initializer_range` of GPT-NeoX has no effect: see `cat_lm.model.initialization`.
    Wrong values raise a `ValueError` that says what is supported.
    """

    model_type = "cat_neox"
    # Tensor parallelism would have to split the filters along with the heads.
    base_model_tp_plan = None

    conv_type: str = "head"
    conv_window: int = 21
    conv_streams: str = "qkv"
    conv_init: str = "identity"
    position_embedding: str = "rope"

    def __post_init__(self, **kwargs: Any) -> None:
        _check_rotary_pct_given_once(self.rope_parameters, kwargs)
        if self.conv_type != "none":
            _check_choice("conv_init", self.conv_init, CONV_INITS)
        _check_choice("conv_type", self.conv_type, CONV_TYPES)
        _check_choice("position_embedding", self.position_embedding, POSITION_EMBEDDINGS)
        _check_streams(self.conv_streams)
        if self.conv_window < 1:
            raise ValueError(f"conv_window={self.conv_window}: a filter needs at least 1 tap")
        super().__post_init__(**kwargs)
        if self.position_embedding == "rope":
            _check_rotary_width(self.rotary_pct, self.hidden_size, self.num_attention_heads)

    @property
    def rotary_pct(self) -> float:
        """The part of a head's channels that rotary positions turn."""
        return self.rope_parameters["partial_rotary_factor"]

    @property
    def convolved_streams(self) -> str:
        """The streams that are convolved, in the order q, k, v; empty without convolutions."""
        if self.conv_type == "none":
            return ""
        return "".join(stream for stream in STREAMS if stream in self.conv_streams)


def _check_choice(name: str, value: str, supported: tuple[str, ...]) -> None:
    if value not in supported:
        raise ValueError(f"{name}={value!r} is not supported; choose one of {', '.join(supported)}")


def _check_streams(streams: str) -> None:
    if not streams or set(streams) - set(STREAMS) or len(set(streams)) != len(streams):
        raise ValueError(
            f"conv_streams={streams!r} must name some of q, k and v, each once, such as 'qkv' "
            "or 'v'; for no convolution set conv_type='none'"
        )


def _check_rotary_pct_given_once(rope: dict | None, kwargs: dict[str, Any]) -> None:
    stored = (rope or {}).get("partial_rotary_factor")
    given = kwargs.get("rotary_pct")
    if stored is not None and given is not None and stored != given:
        raise ValueError(
            f"rotary_pct={given} contradicts rope_parameters['partial_rotary_factor']={stored}"
        )


def _check_rotary_width(rotary_pct: float, hidden_size: int, heads: int) -> None:
    width = int(hidden_size // heads * rotary_pct)
    if not 0 < rotary_pct <= 1 or width < 2 or width % 2:
        raise ValueError(
            f"rotary_pct={rotary_pct} rotates {width} of a head's {hidden_size // heads} channels; "
            "it must be an even number of at least 2 (position_embedding='none' rotates nothing)"
        )
