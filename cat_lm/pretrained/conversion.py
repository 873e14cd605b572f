"""Models made of others: a library's own of ours and back, and one that reads longer contexts.

The methods for longer contexts that a model has, and the fields of its configuration that each
sets; the rules and the numbers are those of `cat_lm.model.rope_scaling`. Imports neither torch nor
transformers before they are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cat_lm import architectures
from cat_lm.core import numbers
from cat_lm.core.errors import UserError
from cat_lm.model import rope_scaling
from cat_lm.model.attention.settings import refuse
from cat_lm.model.rules import scope_problems

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

TOLERANCE = 1e-5  # relative to the largest logit
_ROWS, _TOKENS = 2, 48


def empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Build the model of a known family's configuration, whose weights are not drawn."""
    import torch
    from transformers.initialization import no_init_weights

    with no_init_weights(), torch.random.fork_rng(devices=[]):
        return architectures.classes_of(config).causal_lm(config).eval()


def model_with(config: PreTrainedConfig, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """Build a model with these weights; landmarks' parameters that they lack are as they start."""
    model = empty_model(config)
    dtype = next(iter(weights.values())).dtype
    initial = {
        f"{name}.{key}": values.to(dtype)
        for name, module in model.named_modules()
        for key, values in getattr(module, "initial_values", dict)().items()
    }
    known = initial | dict(weights)
    model.load_state_dict({name: known[name] for name in model.state_dict()}, assign=True)
    model.tie_weights()
    return model


def own_config(source: PreTrainedConfig, **changes: Any) -> PreTrainedConfig:
    """Make our configuration of a model's; a library's, unlike our default, has no convolutions."""
    family = architectures.of_config(source)
    plain = {} if source.model_type == family.model_type else {"conv_type": "none"}
    return family.own_config(source, **plain | changes)


def logits_of(model: PreTrainedModel) -> Tensor:
    """Compute a model's logits [2, T, V] of the same random tokens at every call, T at most 48."""
    import torch

    config, generator = model.config, torch.Generator().manual_seed(0)
    length = min(_TOKENS, getattr(config, "max_position_embeddings", _TOKENS))
    ids = torch.randint(config.vocab_size, (_ROWS, length), generator=generator)
    with torch.inference_mode():
        return model(ids, use_cache=False).logits


def compare_logits(found: Tensor, expected: Tensor, what: str, advice: str) -> float:
    """Return the largest difference of logits, in parts of the largest logit expected.

    Raises UserError, from `what` to `advice`, where it is more than `TOLERANCE`.
    """
    difference = float((found - expected).abs().max() / expected.abs().max())
    if not difference <= TOLERANCE:  # NaN counts as a difference.
        raise UserError(
            f"{what} differ by {difference:.1e} of the largest, more than {TOLERANCE:.0e}; {advice}"
        )
    return difference


def library_model(model: PreTrainedModel) -> PreTrainedModel:
    """Make transformers' own model of a model without convolutions; it takes over the weights.

    Raises UserError where the library has no such model, or where its logits differ.
    """
    config, family = model.config, architectures.of_config(model.config)
    problems = family.library_problems(config)
    if family.library_type is None:
        problems = [f"is of {family.name}, of which transformers has no class"]
    elif streams := getattr(config, "convolved_streams", ""):
        named = f"{config.conv_type} convolutions of {', '.join(streams)}"
        problems = [f"has {named}, which transformers' {family.title} does not have"]
    for problem in problems:
        raise UserError(f"--library: the model {problem}; export it without --library")
    expected = logits_of(model)
    stock = model_with(architectures.library_config(config), model.state_dict())
    what = f"--library: the logits of {family.library}' {family.title} and of the model"
    compare_logits(logits_of(stock), expected, what, "export it without --library")
    return stock


# Longer contexts


def methods_for(config: PreTrainedConfig) -> tuple[str, ...]:
    """List the methods that exist for models of this configuration; the first is always `none`.

    That is the only one of families that scale no positions, and of models that are scaled already:
    another scaling on top would be neither's method.
    """
    family = architectures.find(config)
    if family is None or not family.scales_positions or rope_scaling.is_scaled(config):
        return ("none",)
    return rope_scaling.ROPE_METHODS if rope_scaling.has_rope(config) else rope_scaling.NOPE_METHODS


def scaled_fields(
    config: PreTrainedConfig,
    method: str,
    factor: float,
    training_length: int,
    temperature_scope: str = "logits",
) -> dict[str, Any]:
    """Return the fields of a CAT configuration that make a model of this one use `method`.

    Args:
        config: the configuration of a model that is not scaled yet (see `methods_for`).
        factor: s >= 1, the length to be read over the length trained on. 1 changes nothing.
        training_length: tokens; YaRN's dividing line between frequencies depends on it.
        temperature_scope: the values that the temperature divides.

    Raises:
        ValueError: the method or the scope does not exist for this model, or the factor is below 1.
    """
    if method not in methods_for(config):
        known = ", ".join(methods_for(config))
        raise ValueError(f"method {method!r} does not exist for the model; it has {known}")
    if temperature_scope not in ("logits", "rotary"):
        raise ValueError(f"temperature_scope {temperature_scope!r}: must be logits or rotary")
    refuse(scope_problems(temperature_scope, rope_scaling.has_rope(config)))
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
            "attention_factor": rope_scaling.yarn_magnitude(factor) if in_rope else 1.0,
        }
        if in_rope:
            return fields | {"rope_parameters": rope}
    elif method.startswith("pi"):
        rope |= {"rope_type": "linear", "factor": float(factor)}
    fields["rope_parameters"] = rope
    if method != "pi":
        fields["attention_temperature"] = rope_scaling.yarn_temperature(factor)
        fields["temperature_scope"] = temperature_scope
    return fields


def scaled_config(config: PreTrainedConfig, fields: Mapping[str, Any]) -> PreTrainedConfig:
    """Make a copy of `config` with `fields` (of `scaled_fields`); itself without any.

    A model of the library becomes the same one of ours, whose attention has a temperature.
    """
    if not fields:
        return config
    return own_config(config, **fields)
