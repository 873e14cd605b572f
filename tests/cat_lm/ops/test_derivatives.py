"""Derivatives beyond the first backward pass raise where a kernel would give wrong ones."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from cat_lm.model.sequence import _Exchange
from cat_lm.ops.landmark.decode import can_decode
from cat_lm.ops.recurrence import fla
from tests.cat_lm.ops.compiled import needs_triton


class _Once(torch.autograd.Function):
    """Stands for an operator of fla, whose backward pass fills memory of its own."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.ones_like(gradient)


def test_operator_of_fla_refuses_a_second_derivative():
    x = torch.ones(2, requires_grad=True)
    y = fla._run(lambda q, **_: (_Once.apply(q), None), {"q": x})
    assert torch.equal(torch.autograd.grad(y.sum(), x, retain_graph=True)[0], torch.ones(2))
    with pytest.raises(NotImplementedError, match="mixer_backend=fla has no second derivative"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@needs_triton
def test_landmark_kernel_refuses_a_second_derivative():
    from cat_lm.ops.landmark.segments_triton import SegmentAttention

    with pytest.raises(NotImplementedError, match="second derivative"):
        SegmentAttention.backward(None, torch.ones(1))


def test_decoding_kernel_leaves_tangents_to_torch():
    x = torch.ones(1, 1, 1, 4)
    served = can_decode(x, x, x)
    with forward_ad.dual_level():
        assert not can_decode(forward_ad.make_dual(x, x), x, x)
    assert can_decode(x, x, x) == served


def test_exchange_of_rows_is_differentiable_twice(monkeypatch):
    monkeypatch.setattr("cat_lm.model.sequence._exchange_rows", lambda x, *_: x.detach().clone())
    x = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: _Exchange.apply(x.sin(), [1], [1], None).cos(), x)
