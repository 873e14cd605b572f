"""Two LayerNorms of one residual stream, and the stream's sum with both branches.

In training on a GPU each is one Triton kernel each way, where torch's operators read the stream
once for each norm, and add up its gradients afterwards. Elsewhere, and under torch.compile, which
joins them itself, torch computes: evaluation and generation keep the bits of transformers' models.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cat_lm.ops.runtime.fake import computing_device
from cat_lm.ops.runtime.modules import is_unchanged
from cat_lm.ops.runtime.operators import custom_op, has_tangent
from cat_lm.ops.runtime.triton_launch import INSTALLED, why_not

if INSTALLED:
    from cat_lm.ops.residual import parallel_triton

WIDEST = 8192  # channels: a row of each tensor lies in a program's registers


def two_norms(x: Tensor, first: nn.LayerNorm, second: nn.LayerNorm) -> tuple[Tensor, ...]:
    """Return x, first(x) and second(x), each [..., C].

    Args:
        x: [..., C], the residual stream. What is added to the x that is returned has its gradient
            added up in the kernel.
        first, second: norms of C channels, or whatever stands in their places.
    """
    norms = first, second
    if not (_is_trained_by_a_kernel(x) and all(_is_plain(norm, x) for norm in norms)):
        return x, first(x), second(x)
    if first.eps != second.eps:
        return x, first(x), second(x)
    return _TwoNorms.apply(x, first.weight, first.bias, second.weight, second.bias, first.eps)


def add_branches(*parts: Tensor) -> Tensor:
    """Return the sum of three tensors of one shape; a kernel rounds it once."""
    first, second, third = parts
    same = all((x.shape, x.dtype) == (first.shape, first.dtype) for x in parts)
    if same and _is_trained_by_a_kernel(first):
        return _add(first, second, third)
    return first + second + third


def _is_trained_by_a_kernel(x: Tensor) -> bool:
    """Return True if a derivative in x is asked for that Triton's kernels compute."""
    return (
        torch.is_grad_enabled()
        and x.requires_grad
        and why_not(computing_device(x), x.dtype) is None
        and x.shape[-1] <= WIDEST
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and not has_tangent(x)
    )


def _is_plain(norm: nn.Module, x: Tensor) -> bool:
    """Return True for a LayerNorm that nothing has changed, with weights at hand for x."""
    if not is_unchanged(norm, nn.LayerNorm) or torch.is_autocast_enabled(x.device.type):
        return False
    return all(
        isinstance(weight, nn.Parameter)
        and not hasattr(weight, "placements")  # of a tensor that is divided among devices
        and (weight.shape, weight.dtype) == (x.shape[-1:], x.dtype)
        for weight in (norm.weight, norm.bias)
    )


class _TwoNorms(torch.autograd.Function):
    """The norms with the stream that passes by them, whose gradient the backward kernel adds."""

    @staticmethod
    def forward(ctx, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, eps: float):
        y1, y2, means, scales = _normalize(x, w1, b1, w2, b2, eps)
        ctx.save_for_backward(x, w1, w2, means, scales)
        return x.view_as(x), y1, y2

    @staticmethod
    @once_differentiable
    def backward(ctx, d_passed: Tensor, d_y1: Tensor, d_y2: Tensor):
        dx, sums = _differentiate(d_passed, d_y1, d_y2, *ctx.saved_tensors)
        return dx, *sums.unbind(), None


@custom_op("cat_lm::triton_two_norms")
def _normalize(
    x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return both norms of x, and of each row the mean and 1 / the deviation in fp32."""
    made = _room(x, w1, b1, w2, b2, eps)
    parallel_triton.normalize(x.contiguous(), w1, b1, w2, b2, *made, eps)
    return made


@_normalize.register_fake
def _room(x: Tensor, *_: Tensor | float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    outputs = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2)]
    return *outputs, *(x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))


@custom_op("cat_lm::triton_two_norms_backward")
def _differentiate(
    d_passed: Tensor,
    d_y1: Tensor,
    d_y2: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    means: Tensor,
    scales: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and those of w1, b1, w2 and b2 in one tensor [4, C]."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    given = (tensor.contiguous() for tensor in (d_passed, d_y1, d_y2, x))
    sums = parallel_triton.differentiate(*given, w1, w2, means, scales, dx)
    return dx, sums.to(w1.dtype)


@_differentiate.register_fake
def _gradients(d_passed, d_y1, d_y2, x, w1, w2, means, scales):
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, w1.new_empty(4, *w1.shape)


@custom_op("cat_lm::triton_add_branches")
def _add(first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    out = _empty_sum(first, second, third)
    parallel_triton.add(first.contiguous(), second.contiguous(), third.contiguous(), out)
    return out


@_add.register_fake
def _empty_sum(first: Tensor, *_: Tensor) -> Tensor:
    return torch.empty_like(first, memory_format=torch.contiguous_format)


_add.register_autograd(lambda ctx, d_sum: (d_sum, d_sum, d_sum))
