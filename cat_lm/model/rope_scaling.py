"""Longer contexts than those trained on: scaled rotary positions and attention temperature.

The one definition of position interpolation (PI, Chen et al. 2023, arXiv:2306.15595) and YaRN
(Peng et al. 2023, arXiv:2309.00071) for the length sweep, long-context training and export. A
method is a few fields of a configuration, so that a model scaled here, trained with these fields
or exported with them is the same model:

    pi               rope_parameters: rope_type linear, frequencies divided by the factor s
    pi+temperature   the same, and attention_temperature
    yarn             rope_parameters: rope_type yarn, and attention_temperature
    temperature      attention_temperature alone, for models without positions

The frequencies themselves are computed by transformers, whose YaRN is the published code. With D
rotated channels, base b and training length L, it takes dim(r) = D ln(L / 2 pi r) / (2 ln b),
low = floor(dim(32)), high = ceil(dim(1)), both clamped to [0, D − 1], and divides the frequency of
pair i by s as far as clip((i − low) / (high − low), 0, 1) says.

The temperature t of softmax(q·k / (t sqrt(D))) is 1 / m², m = 0.1 ln s + 1. transformers multiplies
cosines and sines by m instead, which reaches only the rotated channels: a quarter of them in
Pythia. `temperature_scope` says which is meant: `logits` (the publication's formula, and the only
one without positions) or `rotary` (transformers' own).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cat_lm.core import numbers
from cat_lm.core.readers import clipped

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


ROPE_METHODS = ("none", "pi", "pi+temperature", "yarn")
NOPE_METHODS = ("none", "temperature")
METHODS = tuple(dict.fromkeys(ROPE_METHODS + NOPE_METHODS))

# `type` is what transformers used to call `rope_type`, and still reads.
_BASE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
# By type, the keys that must be there and those that may.
_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "yarn": (
        {"factor", "original_max_position_embeddings"},
        {"attention_factor", "beta_fast", "beta_slow", "truncate"},
    ),
}
_RANGES = {
    "factor": numbers.SCALING_FACTOR,
    "original_max_position_embeddings": numbers.CONTEXT,
    "attention_factor": numbers.ROPE_MAGNITUDE,
    "beta_fast": numbers.ROTATIONS,
    "beta_slow": numbers.ROTATIONS,
    "rope_theta": numbers.ROPE_BASE,
    "partial_rotary_factor": numbers.FRACTION,
}


def is_scaled(config: PreTrainedConfig) -> bool:
    """Return True if positions or attention differ from those of a model without any scaling."""
    rope = getattr(config, "rope_parameters", None)
    scaled_rope = rope_type_of(rope) != "default" and has_rope(config)
    return scaled_rope or getattr(config, "attention_temperature", 1.0) != 1


def yarn_magnitude(factor: float) -> float:
    """Return m = 0.1 ln s + 1, the square root of 1/t (YaRN, equation 22); 1 for s <= 1."""
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def yarn_temperature(factor: float) -> float:
    """Return t = 1 / m²: attention logits are q·k / (t sqrt(D))."""
    return yarn_magnitude(factor) ** -2


def logit_temperature(config: Any) -> float:
    """Return t by which attention divides its logits."""
    return float(config.attention_temperature) if config.temperature_scope == "logits" else 1.0


def rotary_magnitude(config: Any) -> float:
    """Return the temperature's factor on cosines and sines: t^(-1/2), or 1."""
    scales = config.temperature_scope == "rotary"
    return float(config.attention_temperature) ** -0.5 if scales else 1.0


def check_rope_parameters(
    rope: Mapping[str, Any] | None, rope_scaling: Mapping[str, Any] | None = None
) -> None:
    """Raise ValueError for unknown or missing keys and for values that mean nothing.

    transformers only warns of unknown keys, and takes `max_position_embeddings` where YaRN's
    original length is missing. `rope_scaling` is its old name of `rope_parameters`.
    """
    if rope and rope_scaling:
        raise ValueError("rope_parameters and rope_scaling: give one of them, rope_parameters")
    given = rope or rope_scaling or {}
    _check_mapping(given)
    rope = {k: v for k, v in given.items() if v is not None}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in _KEYS:
        said, known = clipped(repr(rope_type)), ", ".join(_KEYS)
        raise ValueError(f"rope_parameters.rope_type={said} is not supported; use {known}")
    required, optional = _KEYS[rope_type]
    known = _BASE_KEYS | required | optional
    if unknown := sorted(rope.keys() - known):
        raise ValueError(
            f"rope_parameters.{clipped(unknown[0])}: unknown with rope_type {rope_type}; "
            f"known: {', '.join(sorted(known - {'type'}))}"
        )
    if missing := sorted(required - rope.keys()):
        raise ValueError(f"rope_parameters.{missing[0]}: missing; rope_type {rope_type} needs it")
    check_rope_numbers(rope, tuple(_RANGES))
    if not isinstance(rope.get("truncate", True), bool):
        raise ValueError(
            f"rope_parameters.truncate={clipped(repr(rope['truncate']))}: must be true or false"
        )
    if rope.get("beta_fast", 32) <= rope.get("beta_slow", 1):
        raise ValueError("rope_parameters.beta_fast must be greater than beta_slow")


def check_rope_numbers(
    rope: Mapping[str, Any], names: tuple[str, ...] = ("rope_theta", "partial_rotary_factor")
) -> None:
    """Raise ValueError for a number of `rope_parameters` that is none, or is out of its range."""
    _check_mapping(rope)
    for name in (name for name in names if name in rope):
        value = rope[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        problem = _RANGES[name].problem(value) if is_number else "must be a number"
        if problem:
            raise ValueError(f"rope_parameters.{name}={clipped(repr(value))}: {problem}")


def _check_mapping(rope: Any) -> None:
    if not isinstance(rope, Mapping):
        raise ValueError(f"rope_parameters={rope!r}: must be an object with rope_type and others")


def rope_type_of(rope: Mapping[str, Any] | None) -> str:
    """Return the type in `rope_parameters`, which older versions store under another key."""
    rope = rope or {}
    return rope.get("rope_type") or rope.get("type") or "default"


def has_rope(config: PreTrainedConfig) -> bool:
    """Return True if a model has rotary positions; the library's families that we read all have."""
    return getattr(config, "position_embedding", "rope") == "rope"
