"""The scan's Triton kernels in Triton's interpreter; test_ops_triton.py runs this file."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from cat_lm.ops.recurrence import decaying_scan_triton as _scan_triton
from tests.unit.scans import SHAPES, by, in_torch, inputs, state_of, with_state

LONG = functools.partial(pytest.param, marks=pytest.mark.long)
EVERY = 4  # steps between kept states: fewer than in use, as the interpreter is slow


def check(given: list[Tensor], grad: Tensor) -> None:
    """Outputs, states and gradients against those of the torch path in fp64."""
    given, grads = with_state(given), [grad, state_of(given)]
    found = by(_scan_triton, given, grads, EVERY)
    for one, other in zip(found, in_torch(given, grads, EVERY), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=2e-5)


# Columns that a program has, of the state's five.
@pytest.mark.parametrize(("columns", "time"), [(2, 2 * EVERY + 1), LONG(32, EVERY), (32, 1)])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_torch_path(shape, columns, time, monkeypatch):
    monkeypatch.setattr(_scan_triton, "COLUMNS", columns)
    torch.manual_seed(time)
    *streams, a = inputs(*SHAPES[shape], time)
    rows = 2 if time == 1 else 1
    check([*(s[:, :rows] for s in streams), a], torch.randn(2, rows, time, 2, 5))


def test_many_keys_leave_few_columns(monkeypatch):
    monkeypatch.setattr(_scan_triton, "_NUMBERS", 2)
    monkeypatch.setattr(_scan_triton, "_WARPS", 4)
    torch.manual_seed(0)
    given = [s[:, :1] if s.dim() > 4 else s for s in inputs(*SHAPES["one rate"], 2)]
    _, options, _ = _scan_triton._launch(EVERY, given[0], *given[2:])
    assert (options["KEYS"], options["COLUMNS"], options["num_warps"]) == (4, 2, 4)
    check(given, torch.randn_like(given[2]))


@pytest.mark.parametrize("which", ["rate", "v", *map(LONG, ("k", "q", "grad"))])
def test_an_infinity_stays_where_it_is(which):
    """Of K = 3 keys and V = 5 values the kernel has 4 and 8: what is not there must stay 0."""
    torch.manual_seed(0)
    *streams, a = inputs(*SHAPES["mamba's"], 3, models=1)
    q, k, v, rate = (s.abs()[:, :1] for s in streams)  # no infinity meets one of the other sign
    grad = torch.rand_like(v)
    {"rate": rate, "k": k, "v": v, "q": q, "grad": grad}[which][0, 0, 1, 0].flatten()[1] = torch.inf
    given = with_state([q, k, v, rate, a - 0.1], zero=True)
    grads = [grad, torch.zeros_like(given[-1])]
    found = by(_scan_triton, given, grads, EVERY)
    for one, other in zip(found, in_torch(given, grads, EVERY), strict=True):
        known = ~other.isnan()  # an infinity times a state of 0 is a NaN in torch as well
        assert known.any()
        torch.testing.assert_close(one.double()[known], other[known], rtol=2e-5, atol=2e-5)


def test_inputs_and_gradients_may_have_any_strides():
    torch.manual_seed(0)
    q, k, v, rate, a = inputs(*SHAPES["all"], 3, models=1)
    turned = [s.transpose(1, 3).contiguous().transpose(1, 3) for s in (q, k, v)]
    expanded = (rate[:, :, :, :1].expand_as(rate), a[:, :1].expand_as(a))
    check([*turned, *expanded], torch.randn(1, 3, 3, 1, 5).expand(1, 3, 3, 2, 5))


def test_a_total_decay_leaves_nothing():
    """As where a document starts: the steps from there on are those of a scan of their own."""
    torch.manual_seed(0)
    q, k, v, rate, a = inputs(*SHAPES["mamba's"], EVERY + 2, models=1)
    rate[:, :, 3] = 1e30
    q, k, v, rate = (s[:, :1] for s in (q, k, v, rate))
    given = with_state([q, k, v, rate, a - 0.1])
    out, last, _ = _scan_triton.forward(EVERY, *given)
    later = with_state([s[:, :, 3:] for s in given[:4]] + given[4:5], zero=True)
    alone, last_alone, _ = _scan_triton.forward(EVERY, *later)
    assert torch.equal(out[:, :, 3:], alone) and torch.equal(last, last_alone)
    check([q, k, v, rate, a - 0.1], torch.randn_like(v))


def test_decays_from_none_to_total():
    torch.manual_seed(0)
    q, k, v, rate, _ = inputs(*SHAPES["gla's"], EVERY + 1, models=1)
    check([q, k, v, 200 * rate**6, -torch.ones(1, 1, 1, 1)], torch.randn_like(v))
