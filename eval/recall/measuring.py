"""Measure how right answers are: one model's, or those of a stack of models at once.

Accuracy is the mean over rows of the mean over a row's scored positions. What answers is called
with tokens […, B, T] and positions […, B, n], and gives logits […, B·n, vocabulary]; the dimensions
before the rows are a stack's. Of a model that diverged, one of whose answers is no number, all is
−inf: the likeliest of such logits is a token too, and would be taken for one of chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from cat_lm.core.numbers import IGNORE_INDEX
from eval.recall.model import RecallModel
from eval.recall.tasks import Examples

Answer = Callable[[Tensor, Tensor], Tensor]
_LOGITS = 2**24  # logits made at once for a model


def scored_positions(labels: Tensor) -> Tensor:
    """[…, B, n], the positions of labels [..., B, T] that are scored: as many in every row."""
    found = (labels != IGNORE_INDEX).nonzero()[:, -1]
    return found.view(*labels.shape[:-1], -1)


def measure(model: RecallModel, examples: Examples) -> dict[str, float]:
    """`accuracy`, mean over rows of the share of right positions; `rows_right`, share of rows whose
    positions are all right; `accuracy_GROUP` for each of the examples' groups that has positions.
    Answers before are given (teacher forcing)."""
    model.eval()
    return measure_stack(model, [examples], *_place(model), stacked=False)[0]


def free_running(model: RecallModel, examples: Examples) -> dict[str, float]:
    """The same when a model's own answers are fed back, where labels stand at a row's end."""
    model.eval()
    return free_running_stack(model, [examples], _place(model)[1], stacked=False)[0]


def _place(model: RecallModel) -> tuple[int, torch.device]:
    return len(model.embedding.weight), model.embedding.weight.device


@torch.no_grad()
def measure_stack(
    answer: Answer,
    examples: Sequence[Examples],
    vocabulary: int,
    device: torch.device | str,
    *,
    stacked: bool = True,
) -> list[dict[str, float]]:
    """`measure` for each of S models that answer at once, each with examples of its own.

    Args:
        answer: of models that are in evaluation mode.
        stacked: whether `answer` has a dimension of models; otherwise there is one.
    """
    inputs, labels = _joined(examples, stacked)
    count = int((examples[0].labels[:1] != IGNORE_INDEX).sum())
    rows = max(1, _LOGITS // (count * vocabulary))
    rows = min(rows, max(1, 2**22 // inputs.shape[-1] ** 2))
    right, sound = [], torch.ones(len(examples), dtype=torch.bool)
    for start in range(0, len(examples[0]), rows):
        part = (..., slice(start, start + rows), slice(None))
        tokens, wanted = (torch.from_numpy(x[part]).to(device) for x in (inputs, labels))
        positions = scored_positions(wanted)
        found, numbers = _likeliest(answer(tokens, positions), len(examples))
        right.append((found.view(positions.shape) == wanted.gather(-1, positions)).cpu())
        sound &= numbers
    correct = torch.cat(right, dim=-2).view(len(examples), -1, count)
    measured = [
        {
            "accuracy": float(rows.double().mean(dim=1).mean()),
            "rows_right": float(rows.all(dim=1).double().mean()),
            **{
                f"accuracy_{name}": float(rows.numpy()[group].mean())
                for name, group in part.groups.items()
                if group.any()
            },
        }
        for rows, part in zip(correct, examples, strict=True)
    ]
    return _where_sound(measured, sound)


@torch.no_grad()
def free_running_stack(
    answer: Answer,
    examples: Sequence[Examples],
    device: torch.device | str,
    *,
    stacked: bool = True,
) -> list[dict[str, float]]:
    """`free_running` for each of S models that answer at once; see `measure_stack`."""
    inputs, labels = _joined(examples, stacked)
    first = int((examples[0].labels[0] == IGNORE_INDEX).sum())
    rows = max(1, 2**22 // inputs.shape[-1] ** 2)
    right, sound = [], torch.ones(len(examples), dtype=torch.bool)
    for start in range(0, len(examples[0]), rows):
        part = (..., slice(start, start + rows), slice(None))
        tokens, wanted = (torch.from_numpy(x[part]).to(device) for x in (inputs, labels))
        tokens = tokens[..., : first + 1]
        for _ in range(first, labels.shape[-1]):
            last = tokens.new_full((*tokens.shape[:-1], 1), tokens.shape[-1] - 1)
            found, numbers = _likeliest(answer(tokens, last), len(examples))
            sound &= numbers
            tokens = torch.cat([tokens, found[..., None]], dim=-1)
        right.append((tokens[..., first + 1 :] == wanted[..., first:]).cpu())
    correct = torch.cat(right, dim=-2).view(len(examples), -1, labels.shape[-1] - first)
    measured = [
        {
            "free_running_accuracy": float(rows.double().mean()),
            "free_running_rows_right": float(rows.all(dim=1).double().mean()),
        }
        for rows in correct
    ]
    return _where_sound(measured, sound)


def _likeliest(logits: Tensor, models: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens, […, B·n], and of each model whether all of them have a number."""
    found = logits.argmax(dim=-1)
    highest = logits.gather(-1, found[..., None])
    return found, highest.isfinite().view(models, -1).all(dim=1).cpu()


def _where_sound(measured: Sequence[dict[str, float]], sound: Tensor) -> list[dict[str, float]]:
    return [
        found if fine else dict.fromkeys(found, -math.inf)
        for found, fine in zip(measured, sound.tolist(), strict=True)
    ]


def _joined(examples: Sequence[Examples], stacked: bool) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels, [S, rows, T] of a stack, [rows, T] of one."""
    if not stacked:
        return examples[0].inputs, examples[0].labels
    return np.stack([x.inputs for x in examples]), np.stack([x.labels for x in examples])
