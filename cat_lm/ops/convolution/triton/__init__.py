"""Triton kernels of the causal convolutions, for GPUs and for Triton's interpreter.

Everything that depends on a device or a shape is inside operators that torch.compile does not look
into. `launch.py` holds the tile sizes, `tiles.py` what kernels share, `convolution.py` (per head,
per channel, packed and fused) and `multihead.py` the launches, `decode.py` one token.

Inputs may be fp32, bf16 or fp16; all sums are in fp32. Borders of documents are exact for finite
inputs: what lies across a border is multiplied with an exact zero where matrix units are used
(an infinity or NaN would spread over its tile there), and not read at all elsewhere.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from cat_lm.ops.runtime.triton_launch import INSTALLED, INTERPRETED

# The kinds that have a kernel, and those that have one for packed q, k and v.
KINDS: tuple[str, ...] = ()
PACKED: tuple[str, ...] = ()
triton_conv_qkv = None
if INSTALLED:
    from cat_lm.ops.convolution.kinds.operators import convolution_operator, packed_operator
    from cat_lm.ops.convolution.triton import convolution, multihead, rotation
    from cat_lm.ops.convolution.triton.launch import WIDEST_DOT_WINDOW, rotates_separately, uses_dot

    KINDS, PACKED = ("head", "depthwise", "multihead"), ("head",)

    def _module(conv_type: str) -> ModuleType:
        return multihead if conv_type == "multihead" else convolution

    def _empty_output(conv_type: str, x: Tensor) -> Tensor:
        return x.new_empty(x.shape)

    triton_conv = convolution_operator(
        "triton_conv",
        lambda conv_type, *given: _module(conv_type).forward(conv_type, *given),
        lambda conv_type, *given: _module(conv_type).backward(conv_type, *given),
        _empty_output,
    )
    triton_conv_qkv = packed_operator(
        *("triton_conv_qkv", convolution.forward_packed, convolution.backward_packed),
        _empty_output,
    )


def convolve(
    conv_type: str,
    x: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    positions: Tensor | None,
    rotary: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute as `reference.convolve` of the kinds, rotated by the positions if angles are given.

    Args:
        positions: int32.
        rotary: (cos, sin), [B or 1, T, R], of any floating dtype; they get no gradient.

    Returns:
        [B, T, H, D] in x's dtype, contiguous: attention's output then is, too, and needs no copy.
        A separate rotation kernel (`rotates_separately`) rounds once more.
    """
    cos, sin = (None, None) if rotary is None else rotary
    return triton_conv(conv_type, x, filters, bias, positions, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions alone, on x [B, T, H, D]; see `cat_lm.ops.rotate`."""
    return rotation.rotate(x, cos, sin, False)


def describe(conv_type: str, dtype: torch.dtype, window: int) -> str:
    """Return how the kernels compute a convolution."""
    interpreter = "Triton's interpreter, slowly: " if INTERPRETED else "Triton: "
    if conv_type == "multihead":
        precision = "fp32 products" if dtype == torch.float32 else "matrix units"
        return f"{interpreter}block Toeplitz matrices over heads and time, {precision}"
    if conv_type == "depthwise":
        return f"{interpreter}sum over lags (filters per channel)"
    if uses_dot(dtype, window, False):
        turns = ", rotation by a kernel of its own" if rotates_separately(dtype, window) else ""
        return f"{interpreter}banded Toeplitz matrices on matrix units{turns}"
    reason = "fp32 is exact so" if dtype == torch.float32 else f"W is above {WIDEST_DOT_WINDOW}"
    return f"{interpreter}sum over lags ({reason})"
