"""Inputs of a decaying scan with every combination of dimensions, and its results in fp64."""

from __future__ import annotations

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
    """q, k, v, rate and a of `models` models, 3 rows, 2 heads, 3 keys, 5 values."""
    q, k = torch.randn(2, models, 3, time, 2, 3)
    v = torch.randn(models, 3, time, 2, 5)
    return [q, k, v, torch.rand(models, 3, time, 2, *rate), -3 * torch.rand(models, *a)]


def in_torch(given: list[Tensor], grad: Tensor, every: int = EVERY) -> list[Tensor]:
    """Outputs, kept states and gradients in fp64 by the torch path."""
    double = [s.double() for s in given]
    out, kept = _scan_torch.forward(every, *double)
    return [out, kept, *_scan_torch.backward(every, kept, grad.double(), *double)]
