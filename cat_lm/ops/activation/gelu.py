"""The exact GELU of a product and a bias, for training.

    y = gelu(x + b),   dx = dy gelu'(x + b),   db = sum of dx over rows

A kernel computes each direction in one pass, in fp32 whatever the dtype of x: gelu.cpp on a CPU,
gelu_triton.py on a GPU. Elsewhere (other devices, fp64, no compiler) and for second derivatives
torch's operators do. The choice is made inside of the operator, so nothing is built while
torch.compile traces.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.ops.runtime import triton_launch
from cat_lm.ops.runtime.compiler import SHARED, Sources
from cat_lm.ops.runtime.fake import computing_device
from cat_lm.ops.runtime.native import Kernel
from cat_lm.ops.runtime.operators import custom_op, register_in_turn
from cat_lm.ops.runtime.precision import at_least_fp32

if triton_launch.INSTALLED:
    from cat_lm.ops.activation import gelu_triton

# By their numbers in gelu.cpp.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# `GeluCall` of gelu.cpp; `work` is the numbers of x.
KERNEL = Kernel(
    "gelu",
    Sources("gelu", (Path(__file__).with_name("gelu.cpp"), *SHARED)),
    integers=("dtype", "threads", "rows", "width"),
    pointers=("product", "bias", "grad", "out", "bias_gradient", "workspace"),
    small=1 << 16,
)


def gelu_with_bias(product: Tensor, bias: Tensor) -> Tensor:
    """Return gelu(product + bias), by the error function and not by its tanh approximation.

    The sum and the GELU are in fp32 at least and rounded once, and so is the gradient of the bias,
    whose sum over rows does not depend on the number of threads. Besides rounding, the kernel's y
    is within 3e-7, and its derivative within 7e-7. Forward-mode differentiation raises
    NotImplementedError.

    Args:
        product: [..., I].
        bias: [I], maybe of a wider dtype.

    Returns:
        [..., I] in the dtype of `product`.

    Raises:
        ValueError: the shapes do not fit.
    """
    if bias.shape != product.shape[-1:]:
        raise ValueError(f"a bias {list(bias.shape)} does not fit a product {list(product.shape)}")
    return _forward(product, bias)


@custom_op("cat_lm::gelu_with_bias")
def _forward(product: Tensor, bias: Tensor) -> Tensor:
    out = _empty_output(product, bias)
    if _has_triton(product):
        gelu_triton.forward(product.contiguous(), bias, out)
    elif _has_kernel(product, bias):
        _run(product, bias, out=out)
    else:
        out = F.gelu(_sum(product, bias)).to(product.dtype)
    return out


@_forward.register_fake
def _empty_output(product: Tensor, bias: Tensor) -> Tensor:
    return product.new_empty(product.shape)


@custom_op("cat_lm::gelu_with_bias_backward")
def _backward(grad: Tensor, product: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the product and the bias."""
    if _has_triton(product):
        of_product = product.new_empty(product.shape)
        given = grad.contiguous(), product.contiguous(), bias, of_product
        return of_product, gelu_triton.backward(*given).to(bias.dtype)
    if not _has_kernel(product, bias):
        return _differentiable_backward(grad, product, bias)
    of_product, of_bias = product.new_empty(product.shape), bias.new_empty(bias.shape).float()
    _run(product, bias, grad=grad, out=of_product, bias_gradient=of_bias)
    return of_product, of_bias.to(bias.dtype)


@_backward.register_fake
def _(grad: Tensor, product: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return product.new_empty(product.shape), bias.new_empty(bias.shape)


def _differentiable_backward(grad: Tensor, product: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    given = _sum(product, bias)
    found = torch.ops.aten.gelu_backward(grad.to(given.dtype), given)
    return found.to(product.dtype), found[None].flatten(0, -2).sum(dim=0).to(bias.dtype)


def _sum(product: Tensor, bias: Tensor) -> Tensor:
    return product.to(at_least_fp32(product)) + bias


def _has_triton(product: Tensor) -> bool:
    return triton_launch.why_not(computing_device(product), product.dtype) is None


def _has_kernel(*tensors: Tensor) -> bool:
    is_served = all(x.device.type == "cpu" and x.dtype in DTYPES for x in tensors)
    return is_served and KERNEL.is_built


def _run(product: Tensor, bias: Tensor, **tensors: Tensor) -> None:
    width = bias.numel()
    numbers = {"dtype": DTYPES[product.dtype], "rows": product.numel() // max(1, width)}
    tensors |= {"product": product, "bias": bias.float()}
    KERNEL(tensors, work=product.numel(), width=width, **numbers)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    # Where a second derivative may follow, the gradients need a graph.
    differentiate = _differentiable_backward if torch.is_grad_enabled() else _backward
    return differentiate(grad, *ctx.saved_tensors)


_forward.register_autograd(_gradients, setup_context=_setup_context)
register_in_turn(_forward, _backward)
