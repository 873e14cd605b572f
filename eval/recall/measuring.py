"""Measure how right answers are, of a stack of models at once or of one, which is a stack of one.

Accuracy is the mean over rows of the mean over a row's scored positions. What answers is called
with tokens [S, B, T] and positions [S, B, n], and gives logits [S, B·n, vocabulary]. Of a model
that diverged, one of whose answers is no number, all is −inf: the likeliest of such logits is a
token too, and would be taken for one of chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from cat_lm.core.numbers import IGNORE_INDEX
from eval.recall.tasks import Examples

Answer = Callable[[Tensor, Tensor], Tensor]
# Tokens, labels -> answers and what is right, [S, B, n] each; of which models all have a number.
Answered = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
_LOGITS = 2**24  # logits that are computed at once for a model
_SQUARES = 2**22  # limit of the sum of squared row lengths in a batch


def scored_positions(labels: Tensor) -> Tensor:
    """Return the scored positions […, B, n] of labels [..., B, T]: the same number in every row."""
    found = (labels != IGNORE_INDEX).nonzero()[:, -1]
    return found.view(*labels.shape[:-1], -1)


def stack_of(model: nn.Module) -> Answer:
    """Return what answers as a stack of this model alone."""
    return lambda tokens, positions: model(tokens[0], positions[0])[None]


@torch.no_grad()
def measure(
    answer: Answer,
    examples: Sequence[Examples],
    vocabulary: int,
    device: torch.device | str,
    *,
    runs_free: bool = False,
) -> list[dict[str, float]]:
    """Measure S models, in evaluation mode, each on rows of its own.

    Args:
        runs_free: whether to feed models their own answers too, where labels stand at a row's end.

    Returns:
        For each model `accuracy`; `rows_right`, the share of rows whose positions are all right;
        `accuracy_GROUP` for each of the rows' groups that has positions: all with the answers
        before given. `free_running_accuracy` and `free_running_rows_right`: with its own ones.
    """

    def forced(tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        positions = scored_positions(labels)
        found, is_sound = _likeliest(answer(tokens, positions))
        return found.view(positions.shape), labels.gather(-1, positions), is_sound

    def free(tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = int((labels[0, 0] == IGNORE_INDEX).sum())
        tokens, sound = tokens[..., : first + 1], True
        for _ in range(first, labels.shape[-1]):
            last = tokens.new_full((*tokens.shape[:-1], 1), tokens.shape[-1] - 1)
            found, is_sound = _likeliest(answer(tokens, last))
            sound = sound & is_sound
            tokens = torch.cat([tokens, found[..., None]], dim=-1)
        return tokens[..., first + 1 :], labels[..., first:], sound

    count = int((examples[0].labels[:1] != IGNORE_INDEX).sum())
    found = _shares(forced, examples, max(1, _LOGITS // (count * vocabulary)), device)
    if runs_free:
        own = _shares(free, examples, len(examples[0]), device)
        names = ("accuracy", "rows_right")
        found = [
            one | {f"free_running_{name}": other[name] for name in names}
            for one, other in zip(found, own, strict=True)
        ]
    return found


def _shares(
    answered: Answered, examples: Sequence[Examples], most: int, device: torch.device | str
) -> list[dict[str, float]]:
    """Return each model's shares of right answers, reading at most `most` rows at once."""
    inputs, labels = (np.stack([getattr(e, x) for e in examples]) for x in ("inputs", "labels"))
    most = min(most, max(1, _SQUARES // inputs.shape[-1] ** 2))
    right, sound = [], torch.ones(len(examples), dtype=torch.bool)
    for start in range(0, inputs.shape[1], most):
        part = (torch.from_numpy(x[:, start : start + most]).to(device) for x in (inputs, labels))
        found, wanted, is_sound = answered(*part)
        right.append((found == wanted).cpu())
        sound &= is_sound
    shares = []
    for rows, of, is_sound in zip(torch.cat(right, dim=1), examples, sound.tolist(), strict=True):
        found = {
            "accuracy": float(rows.double().mean(dim=1).mean()),
            "rows_right": float(rows.all(dim=1).double().mean()),
        }
        for name, group in of.groups.items():
            if group.any():
                found[f"accuracy_{name}"] = float(rows.numpy()[group].mean())
        shares.append(found if is_sound else dict.fromkeys(found, -math.inf))
    return shares


def _likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the likeliest tokens [S, B·n], and for each model whether all logits are numbers."""
    found = logits.argmax(dim=-1)
    highest = logits.gather(-1, found[..., None])
    return found, highest.isfinite().flatten(1).all(dim=1).cpu()
