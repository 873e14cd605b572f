"""Derivatives beyond the first backward pass are right or raise, never silently wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from cat_lm.model.sequence import _Exchange
from cat_lm.ops import head_conv
from cat_lm.ops.convolution import triton  # noqa: F401 - defines operators
from cat_lm.ops.convolution.multi_token import _Convolution
from cat_lm.ops.landmark.decode import can_decode
from cat_lm.ops.landmark.segments_triton import SegmentAttention
from cat_lm.ops.long_filter import api  # noqa: F401 - defines operators
from cat_lm.ops.loss.linear_cross_entropy import linear_cross_entropy
from cat_lm.ops.recurrence import fla
from cat_lm.ops.recurrence.decaying_scan import decaying_scan

LABELS = torch.tensor([3, 0, -100, 4, 1, 4])


def _scanned(q: Tensor, v: Tensor) -> Tensor:
    rate = torch.ones(1, 5, 2, 1, 1, dtype=q.dtype)
    return decaying_scan(q, q.sin(), v, rate, -rate[0, 0])


# A function, and the shapes of its tensors.
CASES = {
    "loss": (lambda h, w: linear_cross_entropy(h, w, LABELS), (6, 3), (5, 3)),
    "convolution": (lambda x, f: head_conv(x, f, backend="cpu"), (1, 6, 2, 3), (2, 3)),
    "reference": (lambda x, f: head_conv(x, f, backend="reference"), (1, 6, 2, 3), (2, 3)),
    "scan": (_scanned, (1, 5, 2, 3), (1, 5, 2, 2)),
    "maps": (_Convolution.apply, (1, 2, 4, 5), (2, 2, 3)),
}
MODES = {
    "jvp": lambda f, x, t: torch.func.jvp(f, x, t)[1],
    "jvp of a gradient": lambda f, x, t: _dot(
        torch.func.jvp(lambda *x: torch.func.grad(f, (0, 1))(*x), x, t)[1], t
    ),
    "gradient of a gradient": lambda f, x, t: _dot(_gradients(_along(f, t), x), t),
    "hessian": lambda f, x, t: torch.func.hessian(lambda s: f(x[0] + s * t[0], x[1] + s * t[1]))(
        torch.zeros((), dtype=torch.float64)
    ),
}


def _dot(some: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> Tensor:
    return sum((a * b).sum() for a, b in zip(some, others, strict=True) if a is not None)


def _gradients(function, inputs, **how):
    inputs = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*inputs), inputs, allow_unused=True, **how)


def _along(function, tangents):
    def slope(*inputs):
        return _dot(torch.autograd.grad(function(*inputs), inputs, create_graph=True), tangents)

    return slope


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_other_derivatives_are_right_or_raise(case, mode):
    apply, *shapes = CASES[case]
    torch.manual_seed(0)
    inputs, tangents = (
        tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes) for _ in range(2)
    )

    def total(*inputs: Tensor) -> Tensor:
        return apply(*inputs).sin().sum()

    def beside(step: float) -> Tensor:
        return total(*(x + step * t for x, t in zip(inputs, tangents, strict=True)))

    if mode == "jvp":
        wanted = (beside(1e-5) - beside(-1e-5)) / 2e-5
    else:
        wanted = (beside(1e-3) - 2 * beside(0) + beside(-1e-3)) / 1e-6
    try:
        found = MODES[mode](total, inputs, tangents)
    except (NotImplementedError, RuntimeError):
        assert case != "reference"
        return
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_backward_passes_of_kernels_refuse_a_graph():
    """A gradient that does not require one itself makes no difference."""

    class Ctx:
        chosen, saved_tensors = 0, ()

    with pytest.raises(NotImplementedError, match="second derivative"):
        SegmentAttention.backward(Ctx, torch.ones(1))

    x = torch.ones(2, requires_grad=True)
    y = fla._run(lambda q, **_: (_Once.apply(q), None), {"q": x})
    assert torch.equal(torch.autograd.grad(y.sum(), x, retain_graph=True)[0], torch.ones(2))
    with pytest.raises(NotImplementedError, match="mixer_backend=fla has no second derivative"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


class _Once(torch.autograd.Function):
    """Stands for an operator of fla, whose backward pass fills memory of its own."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.ones_like(gradient)


def test_the_decoding_kernel_leaves_tangents_to_torch():
    x = torch.ones(1, 1, 1, 4)
    served = can_decode(x, x, x)
    with forward_ad.dual_level():
        assert not can_decode(forward_ad.make_dual(x, x), x, x)
    assert can_decode(x, x, x) == served


def test_the_exchange_of_rows_is_differentiable_twice(monkeypatch):
    """As its gradient is an exchange, which has a gradient, too."""
    monkeypatch.setattr("cat_lm.model.sequence._exchanged", lambda x, *_: x.detach().clone())
    x = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: _Exchange.apply(x.sin(), [1], [1], None).cos(), x)
