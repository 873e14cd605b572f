"""Triton's kernels of parallel.py: a row of C channels in a program, sums in fp32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cat_lm.ops.runtime.triton_launch import cdiv, next_power_of_2, on_device_of

# Programs of the backward pass, each of which sums the weights' gradients over its rows: four to a
# multiprocessor of an H100, and few partial sums beside the tensors. The number does not depend on
# the device, so that the order of sums does not either.
PROGRAMS = 512
_CHANNELS = 8  # of a thread: 16 bytes of bf16
_SUMMED = 4096  # numbers of a program that adds branches


@triton.jit
def norms_kernel(
    x_ptr,
    w1_ptr,
    b1_ptr,
    w2_ptr,
    b2_ptr,
    y1_ptr,
    y2_ptr,
    means_ptr,
    scales_ptr,
    eps,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute both norms of a row, and keep its mean and 1 / its deviation."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    here = row * COLUMNS + column
    x = tl.load(x_ptr + here, inside, 0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / COLUMNS
    x = tl.where(inside, x - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / COLUMNS + eps)
    x = x * scale
    tl.store(means_ptr + row, mean)
    tl.store(scales_ptr + row, scale)
    w1 = tl.load(w1_ptr + column, inside, 0.0).to(tl.float32)
    b1 = tl.load(b1_ptr + column, inside, 0.0).to(tl.float32)
    w2 = tl.load(w2_ptr + column, inside, 0.0).to(tl.float32)
    b2 = tl.load(b2_ptr + column, inside, 0.0).to(tl.float32)
    tl.store(y1_ptr + here, (x * w1 + b1).to(y1_ptr.dtype.element_ty), inside)
    tl.store(y2_ptr + here, (x * w2 + b2).to(y2_ptr.dtype.element_ty), inside)


@triton.jit
def norms_backward_kernel(
    d_passed_ptr,
    d_y1_ptr,
    d_y2_ptr,
    x_ptr,
    w1_ptr,
    w2_ptr,
    means_ptr,
    scales_ptr,
    dx_ptr,
    sums_ptr,
    rows,
    programs,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradient of every `programs`-th row, and the weights' partial sums over these.

    With x̂ = (x − mean) scale and g = w1 dy1 + w2 dy2, a row's gradient is that of the stream which
    passed by, plus scale (g − mean(g) − x̂ mean(g x̂)).
    """
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    w1 = tl.load(w1_ptr + column, inside, 0.0).to(tl.float32)
    w2 = tl.load(w2_ptr + column, inside, 0.0).to(tl.float32)
    d_w1 = tl.zeros([BLOCK], tl.float32)
    d_b1 = tl.zeros([BLOCK], tl.float32)
    d_w2 = tl.zeros([BLOCK], tl.float32)
    d_b2 = tl.zeros([BLOCK], tl.float32)
    here = program.to(tl.int64) * COLUMNS + column
    for row in range(program, rows, programs):
        d_y1 = tl.load(d_y1_ptr + here, inside, 0.0).to(tl.float32)
        d_y2 = tl.load(d_y2_ptr + here, inside, 0.0).to(tl.float32)
        x = tl.load(x_ptr + here, inside, 0.0).to(tl.float32)
        d_passed = tl.load(d_passed_ptr + here, inside, 0.0).to(tl.float32)
        scale = tl.load(scales_ptr + row)
        x = (x - tl.load(means_ptr + row)) * scale
        d_w1 += d_y1 * x
        d_b1 += d_y1
        d_w2 += d_y2 * x
        d_b2 += d_y2
        g = w1 * d_y1 + w2 * d_y2
        along = tl.sum(g * x, axis=0) / COLUMNS
        dx = d_passed + scale * (g - tl.sum(g, axis=0) / COLUMNS - x * along)
        tl.store(dx_ptr + here, dx.to(dx_ptr.dtype.element_ty), inside)
        here += programs * COLUMNS
    sums_ptr += program * 4 * COLUMNS + column
    tl.store(sums_ptr, d_w1, inside)
    tl.store(sums_ptr + COLUMNS, d_b1, inside)
    tl.store(sums_ptr + 2 * COLUMNS, d_w2, inside)
    tl.store(sums_ptr + 3 * COLUMNS, d_b2, inside)


@triton.jit
def add_kernel(first_ptr, second_ptr, third_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """Add three tensors, in this order."""
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = here < count
    total = tl.load(first_ptr + here, inside).to(tl.float32)
    total += tl.load(second_ptr + here, inside).to(tl.float32)
    total += tl.load(third_ptr + here, inside).to(tl.float32)
    tl.store(out_ptr + here, total.to(out_ptr.dtype.element_ty), inside)


def _sizes(columns: int) -> dict[str, int]:
    warp = 32 if torch.version.hip is None else 64
    block = next_power_of_2(columns)
    warps = min(max(1, block // (_CHANNELS * warp)), 1024 // warp)
    return {"COLUMNS": columns, "BLOCK": block, "num_warps": warps}


def normalize(
    x: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    y1: Tensor,
    y2: Tensor,
    means: Tensor,
    scales: Tensor,
    eps: float,
) -> None:
    """Fill both norms of x [..., C], and the rows' means and 1 / deviations [...] in fp32."""
    if x.numel() == 0:
        return
    with on_device_of(x):
        norms_kernel[(means.numel(),)](
            x_ptr=x,
            w1_ptr=w1,
            b1_ptr=b1,
            w2_ptr=w2,
            b2_ptr=b2,
            y1_ptr=y1,
            y2_ptr=y2,
            means_ptr=means,
            scales_ptr=scales,
            eps=eps,
            **_sizes(x.shape[-1]),
        )


def differentiate(
    d_passed: Tensor,
    d_y1: Tensor,
    d_y2: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    means: Tensor,
    scales: Tensor,
    dx: Tensor,
) -> Tensor:
    """Fill the gradient of x, and return those of w1, b1, w2 and b2, fp32 [4, C]."""
    rows, columns = means.numel(), x.shape[-1]
    programs = min(PROGRAMS, rows)
    sums = x.new_empty(programs, 4, columns, dtype=torch.float32)
    if rows:
        with on_device_of(x):
            norms_backward_kernel[(programs,)](
                d_passed_ptr=d_passed,
                d_y1_ptr=d_y1,
                d_y2_ptr=d_y2,
                x_ptr=x,
                w1_ptr=w1,
                w2_ptr=w2,
                means_ptr=means,
                scales_ptr=scales,
                dx_ptr=dx,
                sums_ptr=sums,
                rows=rows,
                programs=programs,
                **_sizes(columns),
            )
    return sums.sum(dim=0)


def add(first: Tensor, second: Tensor, third: Tensor, out: Tensor) -> None:
    """Fill the sum of three contiguous tensors."""
    count = out.numel()
    if count == 0:
        return
    with on_device_of(out):
        add_kernel[(cdiv(count, _SUMMED),)](
            first_ptr=first,
            second_ptr=second,
            third_ptr=third,
            out_ptr=out,
            count=count,
            BLOCK=_SUMMED,
            num_warps=16 if torch.version.hip is None else 8,
        )
