"""Configurations of models that read longer contexts than they were trained on.

The methods that a model has and the fields of its configuration that each sets; the rules and the
numbers are those of `cat_lm.model.rope_scaling`. Which families scale positions, their registry
knows. Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cat_lm import architectures
from cat_lm.core import numbers
from cat_lm.model.attention.settings import refuse
from cat_lm.model.rope_scaling import (
    NOPE_METHODS,
    ROPE_METHODS,
    has_rope,
    is_scaled,
    yarn_magnitude,
    yarn_temperature,
)
from cat_lm.model.rules import scope_problems

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def methods_for(config: PreTrainedConfig) -> tuple[str, ...]:
    """List the methods that exist for models of this configuration; the first is always `none`.

    Families that scale positions have `ROPE_METHODS`, or `NOPE_METHODS` without positions. Other
    architectures, and models that are scaled already (another scaling on top would be neither's
    method), have only `none`: the model as it is.
    """
    family = architectures.find(config)
    if family is None or not family.scales_positions or is_scaled(config):
        return ("none",)
    return ROPE_METHODS if has_rope(config) else NOPE_METHODS


def scaled_fields(
    config: PreTrainedConfig,
    method: str,
    factor: float,
    training_length: int,
    temperature_scope: str = "logits",
) -> dict[str, Any]:
    """Return the fields of a CAT configuration that make a model of this one use `method`.

    Args:
        config: of a model that is not scaled yet (see `methods_for`).
        factor: s >= 1, the length to be read over the length trained on. 1 changes nothing.
        training_length: tokens; YaRN's dividing line between frequencies depends on it.
        temperature_scope: what the temperature acts on.

    Returns:
        The fields, among them the new `max_position_embeddings`; empty where the model stays as it
        is.

    Raises:
        ValueError: the method or the scope does not exist for this model, or the factor is below 1.
    """
    if method not in methods_for(config):
        known = ", ".join(methods_for(config))
        raise ValueError(f"method {method!r} does not exist for the model; it has {known}")
    refuse(scope_problems(temperature_scope, has_rope(config)))
    if problem := numbers.SCALING_FACTOR.problem(factor):
        raise ValueError(f"factor {factor}: {problem}")
    if method == "none" or factor == 1:
        return {}
    fields: dict[str, Any] = {"max_position_embeddings": round(factor * training_length)}
    rope = dict(config.rope_parameters)
    if method == "yarn":
        in_rope = temperature_scope == "rotary"
        # Stored even where it is 1: without it, transformers would apply its own.
        rope |= {
            "rope_type": "yarn",
            "factor": float(factor),
            "original_max_position_embeddings": training_length,
            "attention_factor": yarn_magnitude(factor) if in_rope else 1.0,
        }
        if in_rope:
            return fields | {"rope_parameters": rope}
    elif method.startswith("pi"):
        rope |= {"rope_type": "linear", "factor": float(factor)}
    fields["rope_parameters"] = rope
    if method != "pi":
        fields["attention_temperature"] = yarn_temperature(factor)
        fields["temperature_scope"] = temperature_scope
    return fields


def scaled_config(config: PreTrainedConfig, fields: Mapping[str, Any]) -> PreTrainedConfig:
    """Make a copy of `config` with `fields` (of `scaled_fields`); itself without any.

    A model of the library becomes one of ours without convolutions, the same model, whose attention
    has a temperature.
    """
    if not fields:
        return config
    family = architectures.of_config(config)
    plain = {} if config.model_type == family.model_type else {"conv_type": "none"}
    return family.own_config(config, **plain | dict(fields))
