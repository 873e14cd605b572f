"""A model of this project as the model of transformers, or of another library, that computes the
same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cat_lm import architectures
from cat_lm.core.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

TOLERANCE = 1e-5  # of the largest logit
_ROWS, _TOKENS = 2, 48


def checked_ids(vocab_size: int, longest: int = _TOKENS) -> Tensor:
    """Draw the tokens [2, 48 or `longest`] on which two models' logits are compared."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (_ROWS, min(longest, _TOKENS)), generator=generator)


def difference_of_logits(logits: Tensor, expected: Tensor) -> float:
    """Return the largest difference, in parts of the largest logit expected."""
    return float((logits - expected).abs().max() / expected.abs().max())


def library_model(model: PreTrainedModel) -> PreTrainedModel:
    """Make transformers' own model of a model without convolutions; it takes over the weights.

    Raises:
        UserError: the library has no such model, or its logits differ.
    """
    import torch

    config, family = model.config, architectures.of_config(model.config)
    for problem in _problems(config, family):
        raise UserError(f"--library: the model {problem}; export it without --library")
    with torch.random.fork_rng(devices=[]):
        stock = family.library_classes().causal_lm(family.library_config(config)).eval()
    ids = checked_ids(config.vocab_size, config.max_position_embeddings)
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
    stock.load_state_dict(model.state_dict(), assign=True)
    stock.tie_weights()
    with torch.inference_mode():
        logits = stock(ids, use_cache=False).logits
    difference = difference_of_logits(logits, expected)
    if not difference <= TOLERANCE:  # also where it is NaN
        raise UserError(
            f"--library: the logits of {family.library}' {family.title} differ from the model's by "
            f"{difference:.1e} of the largest, more than {TOLERANCE:.0e}; export without --library"
        )
    return stock


def _problems(config: PreTrainedConfig, family: architectures.Architecture) -> list[str]:
    """Return what of a model transformers' class does not have."""
    if family.library_type is None:
        return [f"is of {family.name}, of which transformers has no class"]
    streams = getattr(config, "convolved_streams", "")
    if streams:
        named = f"{config.conv_type} convolutions of {', '.join(streams)}"
        return [f"has {named}, which transformers' {family.title} does not have"]
    return family.library_problems(config)
