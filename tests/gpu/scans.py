"""Inputs of a decaying scan with every combination of dimensions, and its results in fp64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cat_lm.ops.recurrence import decaying_scan_torch as _scan_torch
from cat_lm.ops.recurrence.decaying_scan import EVERY

# Sizes of the rate (K, V), and of a (H, K, V), where K = 3, V = 5 and H = 2 of the state.
SHAPES = {
    "mamba's": ((1, 5), (1, 3, 5)),
    "gla's": ((3, 1), (1, 1, 1)),
    "mamba 2's": ((1, 1), (2, 1, 1)),
    "all": ((3, 5), (2, 3, 5)),
    "a along keys": ((1, 5), (2, 3, 1)),
    "one rate": ((1, 1), (1, 3, 5)),
}


def inputs(rate: tuple[int, ...], a: tuple[int, ...], time: int, models: int = 2) -> list[Tensor]:
    """Draw q, k, v, rate and a of `models` models, 3 rows, 2 heads, 3 keys, 5 values."""
    q, k = torch.randn(2, models, 3, time, 2, 3)
    v = torch.randn(models, 3, time, 2, 5)
    return [q, k, v, torch.rand(models, 3, time, 2, *rate), -3 * torch.rand(models, *a)]


def state_of(given: list[Tensor]) -> Tensor:
    """Draw a state [M, B, H, K, V] that fits."""
    q, _, v = given[:3]
    return torch.randn(*q.shape[:2], *q.shape[3:], v.shape[-1])


def with_state(given: list[Tensor], *, zero: bool = False) -> list[Tensor]:
    """Add an initial state to q, k, v, rate and a."""
    state = state_of(given)
    return [*given, torch.zeros_like(state) if zero else state]


def by(kernels: Any, given: list[Tensor], grads: list[Tensor], every: int = EVERY) -> list[Tensor]:
    """Compute outputs, last and kept states, and gradients, by one of the scan's backends.

    Args:
        given: q, k, v, rate, a and the initial state.
        grads: of the outputs and of the last state.
    """
    out, last, kept = kernels.forward(every, *given)
    return [out, last, kept, *kernels.backward(every, kept, *grads, *given[:5])]


def in_torch(given: list[Tensor], grads: list[Tensor], every: int = EVERY) -> list[Tensor]:
    """Compute the same in fp64 by the torch path."""
    return by(_scan_torch, [s.double() for s in given], [s.double() for s in grads], every)
