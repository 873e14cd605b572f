"""Triton's kernels of gelu.py: tiles of columns, sums in fp32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cat_lm.ops.runtime.triton_launch import cdiv, on_device_of

# Stripes of rows, each of which has its own sum of the bias' gradient: enough work for a GPU, and
# few partial sums. The number does not depend on the device, so that the order of sums does not.
STRIPES = 128
COLUMNS = 512  # of a program
_ROWS = 4  # that a program has at once: 16 bytes of bf16 a thread


@triton.jit
def forward_kernel(product_ptr, bias_ptr, out_ptr, count, width, BLOCK: tl.constexpr):
    """Compute gelu(product + bias)."""
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = here < count
    x = tl.load(product_ptr + here, inside, 0.0).to(tl.float32)
    x += tl.load(bias_ptr + here % width, inside, 0.0).to(tl.float32)
    y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    tl.store(out_ptr + here, y.to(out_ptr.dtype.element_ty), inside)


@triton.jit
def backward_kernel(
    grad_ptr,
    product_ptr,
    bias_ptr,
    out_ptr,
    sums_ptr,
    rows,
    width,
    stripe,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the product's gradient of a stripe of rows, and its sum over them."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1) * stripe
    last = tl.minimum(first + stripe, rows)
    bias = tl.load(bias_ptr + column, column < width, 0.0).to(tl.float32)
    sums = tl.zeros([COLUMNS], tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < last)[:, None] & (column < width)[None, :]
        here = row.to(tl.int64)[:, None] * width + column[None, :]
        grad = tl.load(grad_ptr + here, inside, 0.0).to(tl.float32)
        x = tl.load(product_ptr + here, inside, 0.0).to(tl.float32) + bias[None, :]
        below = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        dx = grad * (below + x * tl.exp(-0.5 * x * x) * 0.3989422804014327)
        sums += tl.sum(dx, axis=0)
        tl.store(out_ptr + here, dx.to(out_ptr.dtype.element_ty), inside)
    tl.store(sums_ptr + tl.program_id(1) * width + column, sums, column < width)


def forward(product: Tensor, bias: Tensor, out: Tensor) -> None:
    """Fill gelu(product + bias) for a contiguous product [..., I]."""
    count, block = product.numel(), _ROWS * COLUMNS
    if count == 0:
        return
    with on_device_of(product):
        forward_kernel[(cdiv(count, block),)](
            product_ptr=product,
            bias_ptr=bias,
            out_ptr=out,
            count=count,
            width=bias.numel(),
            BLOCK=block,
            num_warps=8 if torch.version.hip is None else 4,
        )


def backward(grad: Tensor, product: Tensor, bias: Tensor, out: Tensor) -> Tensor:
    """Fill the gradient of a contiguous product [..., I], and return that of the bias, fp32 [I]."""
    width = bias.numel()
    rows = product.numel() // max(1, width)
    stripes = min(STRIPES, cdiv(rows, _ROWS))
    sums = bias.new_empty(stripes, width, dtype=torch.float32)
    if rows:
        with on_device_of(product):
            backward_kernel[(cdiv(width, COLUMNS), stripes)](
                grad_ptr=grad,
                product_ptr=product,
                bias_ptr=bias,
                out_ptr=out,
                sums_ptr=sums,
                rows=rows,
                width=width,
                stripe=cdiv(rows, stripes),
                ROWS=_ROWS,
                COLUMNS=COLUMNS,
                num_warps=8 if torch.version.hip is None else 4,
            )
    return sums.sum(dim=0)
