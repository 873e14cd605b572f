"""Models made of other models' weights, and whether they compute the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cat_lm import architectures
from cat_lm.core.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

TOLERANCE = 1e-5  # of the largest logit
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

    Args:
        what, advice: begin and end the message.

    Raises:
        UserError: it is more than `TOLERANCE`.
    """
    difference = float((found - expected).abs().max() / expected.abs().max())
    if not difference <= TOLERANCE:  # also where it is NaN
        raise UserError(
            f"{what} differ by {difference:.1e} of the largest, more than {TOLERANCE:.0e}; {advice}"
        )
    return difference


def library_model(model: PreTrainedModel) -> PreTrainedModel:
    """Make transformers' own model of a model without convolutions; it takes over the weights.

    Raises:
        UserError: the library has no such model, or its logits differ.
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
