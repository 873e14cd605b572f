"""The operators under contract, and how their results are compared with the references.

The one place that knows in which modules operators lie.
"""

# ruff: noqa: F401

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cat_lm import ops
from cat_lm.ops.activation.gelu import gelu_with_bias
from cat_lm.ops.convolution import kinds
from cat_lm.ops.convolution.step import can_step, convolve_step
from cat_lm.ops.long_filter import api as long_filter_api
from cat_lm.ops.long_filter import filters as long_filters
from cat_lm.ops.loss.linear_cross_entropy import linear_cross_entropy
from cat_lm.ops.recurrence import CHUNK, EVERY
from cat_lm.ops.recurrence import backends as recurrence_backends
from cat_lm.ops.recurrence.decaying_scan import decaying_scan
from cat_lm.ops.recurrence.delta_rule import delta_rule
from cat_lm.ops.runtime.triton_launch import INSTALLED, INTERPRETED

long_conv = long_filter_api.long_conv
if INSTALLED:
    from cat_lm.ops.loss.cross_entropy_triton import cross_entropy_

# Relative errors of whole tensors: sums in fp32 at least, and one rounding of a half-precision
# result, which Triton's interpreter does toward zero.
BOUNDS = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.bfloat16: 8e-3,
    torch.float16: 1e-3,
}


def serving(choose: Callable[[str], object], names: Sequence[str]) -> list[str]:
    """Return those backends by name that serve CPU tensors in this process.

    In a process of Triton's interpreter (TRITON_INTERPRET=1) its kernels are among them.
    """
    found = []
    for name in names:
        try:
            choose(name)
        except ValueError:
            continue
        found.append(name)
    return found


def convolution_backends(kind: str) -> list[str]:
    """Return the backends that serve a kind of convolution of fp32 tensors on a CPU."""
    sizes = {"window": 3, "heads": 2, "head_dim": 4, "device": "cpu", "dtype": torch.float32}
    return serving(
        lambda name: ops.choose_backend(kind, backend=name, **sizes), ops.BACKENDS.names()
    )


CONVOLUTIONS = [(kind, name) for kind in kinds.names() for name in convolution_backends(kind)]


def with_gradients(
    results: Sequence[Tensor], leaves: Sequence[Tensor], dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Return results and the gradients of leaves by fixed weights, which `dtype` holds exactly."""
    weights = [
        torch.linspace(-1, 2, y.numel()).to(dtype).to(y.dtype).view(y.shape) for y in results
    ]
    return [*results, *torch.autograd.grad(results, leaves, weights)]


def exact(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return leaves in double precision of what tensors hold."""
    return [x.detach().double().requires_grad_() for x in tensors]


def assert_close(found: Sequence[Tensor], wanted: Sequence[Tensor], bound: float) -> None:
    """Check relative errors of whole tensors, and that nothing but numbers is among them."""
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.shape == other.shape, f"tensor {index}: {one.shape} is not {other.shape}"
        one, other = (x.detach().double() for x in (one, other))
        error, limit = (one - other).norm(), bound * max(float(other.norm()), 1e-3)
        assert error <= limit, f"tensor {index}: an error of {error:.1e}, beyond {limit:.1e}"
