"""The scan's Triton kernels in Triton's interpreter; test_recall_scan_triton.py runs this file."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eval.recall.mixers import _scan_triton
from eval.recall.mixers._scan import EVERY
from tests.unit.scans import SHAPES, in_torch, inputs


def check(given: list[Tensor], grad: Tensor) -> None:
    """Outputs, kept states and gradients against those of the torch path in fp64."""
    out, kept = _scan_triton.forward(EVERY, *given)
    found = [out, kept, *_scan_triton.backward(EVERY, kept, grad, *given)]
    for one, other in zip(found, in_torch(given, grad), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=2e-5)


# Columns that a program has, of the state's five.
@pytest.mark.parametrize(("columns", "time"), [(2, EVERY + 3), (32, EVERY), (32, 1)])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_torch_path(shape, columns, time, monkeypatch):
    monkeypatch.setattr(_scan_triton, "COLUMNS", columns)
    torch.manual_seed(time)
    *streams, a = inputs(*SHAPES[shape], time)
    rows = 2 if time == 1 else 1  # the interpreter is slow
    check([*(s[:, :rows] for s in streams), a], torch.randn(2, rows, time, 2, 5))


def test_inputs_and_gradients_may_have_any_strides():
    torch.manual_seed(0)
    q, k, v, rate, a = inputs(*SHAPES["all"], 3, models=1)
    turned = [s.transpose(1, 3).contiguous().transpose(1, 3) for s in (q, k, v)]
    expanded = (rate[:, :, :, :1].expand_as(rate), a[:, :1].expand_as(a))
    check([*turned, *expanded], torch.randn(1, 3, 3, 1, 5).expand(1, 3, 3, 2, 5))


def test_decays_from_none_to_total():
    torch.manual_seed(0)
    q, k, v, rate, _ = inputs(*SHAPES["gla's"], EVERY + 1, models=1)
    check([q, k, v, 200 * rate**6, -torch.ones(1, 1, 1, 1)], torch.randn_like(v))
