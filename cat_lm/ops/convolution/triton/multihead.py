"""The multi-head convolution by Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from cat_lm.ops.convolution.kinds.operators import empty_gradients
from cat_lm.ops.convolution.triton import launch
from cat_lm.ops.convolution.triton.multihead_kernels import mix_filters_kernel, mix_kernel
from cat_lm.ops.convolution.triton.rotation import rotate, turn
from cat_lm.ops.runtime.triton_launch import (
    cdiv,
    contiguous,
    next_power_of_2,
    on_device_of,
    pointers,
    strides,
    unit_stride,
)

HEADS = 16
# Programs that share the sum over blocks in dF; each leaves STEPS · W · H² numbers.
PARTS = 64


def mix_options(x: Tensor, window: int, documents: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Constants of `mix_kernel` and what its compiler is told.

    128 rows by 256 columns are a tile of a fast matrix product; with documents the matrix differs
    by block, so that no two blocks go into one product. fp32 has no matrix units and small tiles.
    """
    half = x.dtype != torch.float32
    columns = min(128 if half else 64, max(16, next_power_of_2(x.shape[-1])))
    constants = {
        "WINDOW": window,
        "STEPS": 8,
        "HEADS": HEADS,
        "INNER": 4 if half else 2,
        "BLOCKS": max(1, 256 // columns) if half and not documents else 1,
        "COLUMNS": columns,
    }
    return constants, _compiler_options(x)


def filter_options(x: Tensor, window: int) -> tuple[dict[str, int], dict[str, int]]:
    """The same for `mix_filters_kernel`."""
    half = x.dtype != torch.float32
    constants = {
        "WINDOW": window,
        "STEPS": 8,
        "HEADS": HEADS,
        "INNER": 8 if half else 4,
        "COLUMNS": 64 if half else 16,
    }
    return constants, _compiler_options(x)


def _compiler_options(x: Tensor) -> dict[str, int]:
    stages = 1
    if x.dtype != torch.float32:
        # Three stages of the products' tiles take up to 96 KiB, more than AMD's GPUs have.
        stages = 3 if launch.shared_memory(x.device) >= 98304 else 2
    return {"num_warps": 8, "num_stages": stages}


def _mix(
    x: Tensor, filters: Tensor, bias: Tensor | None, positions: Tensor | None, reverse: bool
) -> Tensor:
    """y = M x + bias, or with `reverse` and filters transposed in their heads, Mᵀ x."""
    batch, time, heads, width = x.shape
    constants, options = mix_options(x, filters.shape[0], positions is not None)
    x, y = unit_stride(x), x.new_empty(x.shape)
    blocks = batch * cdiv(time, constants["STEPS"])
    programs = cdiv(heads, HEADS) * cdiv(width, constants["COLUMNS"])
    programs *= cdiv(blocks, constants["BLOCKS"])
    with on_device_of(x):
        mix_kernel[(programs,)](
            **pointers(x=x, f=filters.contiguous(), bias=contiguous(bias), y=y),
            positions_ptr=contiguous(positions),
            batch_size=batch,
            length=time,
            heads=heads,
            width=width,
            **strides("x", x, "bth"),
            REVERSED=reverse,
            **constants,
            **options,
        )
    return y


def forward(
    conv_type: str,
    x: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
) -> Tensor:
    """Compute y[b,t,i,:] = RoPE(bias[i,:] + sum_h sum_j F[j,i,h] x[b,t−j,h,:]), contiguous.

    The rotated channels, a quarter of GPT-NeoX's, are turned where they lie, by a kernel more. In
    the first one they would be columns of a product of their own, of which there are too few.
    """
    y = _mix(x, filters, bias, positions, reverse=False)
    if cos is not None:
        turn(y, y, cos, sin)
    return y


def backward(
    conv_type: str,
    dy: Tensor,
    x: Tensor,
    filters: Tensor,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dx, df and dbias as far as wanted."""
    dx, df, dbias = empty_gradients(x, filters, wanted)
    if cos is not None:  # once, for three that read it
        dy = rotate(dy, cos, sin, True)
    if wanted[0]:
        dx = _mix(dy, filters.transpose(1, 2), None, positions, reverse=True)
    if wanted[1]:
        df = _filter_gradient(dy, x, filters.shape[0], positions)
    if wanted[2]:
        dbias = dy.sum(dim=(0, 1), dtype=torch.float32).to(dy.dtype)
    return dx, df, dbias


def _filter_gradient(dy: Tensor, x: Tensor, window: int, positions: Tensor | None) -> Tensor:
    """Return the gradient of the filters, [W, H, H], summed in fp32 in a fixed order."""
    batch, time, heads, width = x.shape
    constants, options = filter_options(x, window)
    steps, inner = constants["STEPS"], constants["INNER"]
    x, dy = unit_stride(x), unit_stride(dy)
    blocks = batch * cdiv(time, steps)
    blocks_per_program = cdiv(blocks, PARTS)
    parts = cdiv(blocks, blocks_per_program)
    programs = cdiv(heads, HEADS) ** 2 * cdiv(steps + window - 1, inner) * parts
    sums = x.new_empty(parts, steps, window, heads, heads, dtype=torch.float32)
    with on_device_of(x):
        mix_filters_kernel[(programs,)](
            **pointers(dy=dy, x=x, df=sums, positions=contiguous(positions)),
            blocks_per_program=blocks_per_program,
            batch_size=batch,
            length=time,
            heads=heads,
            width=width,
            **strides("dy", dy, "bth"),
            **strides("x", x, "bth"),
            **constants,
            **options,
        )
    return sums.sum(dim=(0, 1)).to(x.dtype)
