"""Measure how right answers are: one model's, or those of a stack of models at once.

Accuracy is the mean over rows of the mean over a row's scored positions. What answers is called
with tokens […, B, T] and positions […, B, n], and gives logits […, B·n, vocabulary]; the dimensions
before the rows are a stack's. Of a model that diverged, one of whose answers is no number, all is
−inf: the likeliest of such logits is a token too, and would be taken for one of chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from cat_lm.core.numbers import IGNORE_INDEX
from eval.recall.model import RecallModel
from eval.recall.tasks import Examples

Answer = Callable[[Tensor, Tensor], Tensor]
_LOGITS = 2**24  # logits made at once for a model
_SQUARES = 2**22  # squares of rows' lengths at once


def scored_positions(labels: Tensor) -> Tensor:
    """[…, B, n], the positions of labels [..., B, T] that are scored: as many in every row."""
    found = (labels != IGNORE_INDEX).nonzero()[:, -1]
    return found.view(*labels.shape[:-1], -1)


def measure(model: RecallModel, examples: Examples) -> dict[str, float]:
    """`accuracy`, mean over rows of the share of right positions; `rows_right`, share of rows whose
    positions are all right; `accuracy_GROUP` for each of the examples' groups that has positions.
    Answers before are given (teacher forcing)."""
    model.eval()
    table = model.embedding.weight
    return measure_stack(model, [examples], len(table), table.device, stacked=False)[0]


def free_running(model: RecallModel, examples: Examples) -> dict[str, float]:
    """The same when a model's own answers are fed back, where labels stand at a row's end."""
    model.eval()
    device = model.embedding.weight.device
    return free_running_stack(model, [examples], device, stacked=False)[0]


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
    count = int((examples[0].labels[:1] != IGNORE_INDEX).sum())
    rows = max(1, _LOGITS // (count * vocabulary))
    right, sound = [], torch.ones(len(examples), dtype=torch.bool)
    for tokens, wanted in _parts(examples, stacked, rows, device):
        positions = scored_positions(wanted)
        found, is_sound = _likeliest(answer(tokens, positions), len(examples))
        right.append((found.view(positions.shape) == wanted.gather(-1, positions)).cpu())
        sound &= is_sound
    measured = []
    for rows, part in zip(_by_model(right, examples), examples, strict=True):
        found = {
            "accuracy": float(rows.double().mean(dim=1).mean()),
            "rows_right": float(rows.all(dim=1).double().mean()),
        }
        for name, group in part.groups.items():
            if group.any():
                found[f"accuracy_{name}"] = float(rows.numpy()[group].mean())
        measured.append(found)
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
    first = int((examples[0].labels[0] == IGNORE_INDEX).sum())
    right, sound = [], torch.ones(len(examples), dtype=torch.bool)
    for tokens, wanted in _parts(examples, stacked, len(examples[0]) or 1, device):
        tokens = tokens[..., : first + 1]
        for _ in range(first, wanted.shape[-1]):
            last = tokens.new_full((*tokens.shape[:-1], 1), tokens.shape[-1] - 1)
            found, is_sound = _likeliest(answer(tokens, last), len(examples))
            sound &= is_sound
            tokens = torch.cat([tokens, found[..., None]], dim=-1)
        right.append((tokens[..., first + 1 :] == wanted[..., first:]).cpu())
    measured = [
        {
            "free_running_accuracy": float(rows.double().mean()),
            "free_running_rows_right": float(rows.all(dim=1).double().mean()),
        }
        for rows in _by_model(right, examples)
    ]
    return _where_sound(measured, sound)


def _parts(
    examples: Sequence[Examples], stacked: bool, most: int, device: torch.device | str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and labels of at most so many rows: [S, rows, T] of a stack, [rows, T] of one."""
    both = [[x.inputs for x in examples], [x.labels for x in examples]]
    both = [np.stack(x) if stacked else x[0] for x in both]
    most = min(most, max(1, _SQUARES // both[0].shape[-1] ** 2))
    for start in range(0, len(examples[0]), most):
        part = (..., slice(start, start + most), slice(None))
        inputs, labels = (torch.from_numpy(x[part]).to(device) for x in both)
        yield inputs, labels


def _by_model(right: Sequence[Tensor], examples: Sequence[Examples]) -> Tensor:
    """Whether answers are right, [S, rows, n]."""
    whole = torch.cat(list(right), dim=-2)
    return whole.view(len(examples), -1, whole.shape[-1])


def _likeliest(logits: Tensor, models: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens, […, B·n], and of each model whether all of them have a number."""
    found = logits.argmax(dim=-1)
    highest = logits.gather(-1, found[..., None])
    return found, highest.isfinite().view(models, -1).all(dim=1).cpu()


def _where_sound(measured: Sequence[dict[str, float]], sound: Tensor) -> list[dict[str, float]]:
    return [
        found if is_sound else dict.fromkeys(found, -math.inf)
        for found, is_sound in zip(measured, sound.tolist(), strict=True)
    ]
