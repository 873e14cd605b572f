"""Triton kernels of the causal convolutions, for GPUs and for Triton's interpreter.

Everything that depends on a device or a shape is inside operators that torch.compile does not look
into. `launch.py` holds the tile sizes, `tiles.py` what kernels share, `convolution.py` (per head,
per channel), `multihead.py` and `qkv.py` (packed and fused) the operators, `decode.py` one token.

Inputs may be fp32, bf16 or fp16; all sums are in fp32. Borders of documents are exact for finite
inputs: what lies across a border is multiplied with an exact zero where matrix units are used
(an infinity or NaN would spread over its tile there), and not read at all elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cat_lm.ops.runtime.triton_launch import INSTALLED, INTERPRETED

if INSTALLED:
    from cat_lm.ops.convolution.triton import rotation
    from cat_lm.ops.convolution.triton.convolution import conv
    from cat_lm.ops.convolution.triton.launch import WIDEST_DOT_WINDOW, turns_apart, uses_dot
    from cat_lm.ops.convolution.triton.multihead import multihead_conv
    from cat_lm.ops.convolution.triton.qkv import conv_qkv

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def convolve(
    conv_type: str,
    x: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    positions: Tensor | None,
    rotary: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The convolution of type `head`, `depthwise` or `multihead`, turned by rotary positions.

    Args:
        x: [B, T, H, D], with any strides.
        filters: [H, W], [H, D, W] or [W, H_out, H_in], lag 0 first, in x's dtype.
        bias: [H, D] in x's dtype.
        positions: int32 [B, T], of each token in its document: inputs further back are zeros.
        rotary: (cos, sin), [B or 1, T, R], of any floating dtype; they get no gradient.

    Returns:
        [B, T, H, D] in x's dtype, contiguous: attention's output then is, too, and needs no copy.
        What is rotated is rounded once more where a kernel of its own does it (`turns_apart`).
    """
    cos, sin = (None, None) if rotary is None else rotary
    return KERNELS[conv_type].operator(x, filters, bias, positions, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions alone, on x [B, T, H, D]; see `cat_lm.ops.rotate`."""
    return rotation.rotate(x, cos, sin, False)


def head_conv_qkv(
    qkv: Tensor,
    filters: tuple[Tensor | None, Tensor | None, Tensor | None],
    bias: Tensor | None,
    rotary: tuple[Tensor, Tensor] | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with convolution, bias and rotation from the packed projection, in one kernel.

    Args:
        qkv: [B, T, H, 3, D], with any strides.
        filters: of q, k and v, [H, W] with one W, or None; in qkv's dtype.
        bias: [H, 3, D] in qkv's dtype.
        rotary, positions: as in `convolve`.

    Returns:
        q, k, v, each [B, T, H, D]. The rotation is done in fp32, before the one rounding to qkv's
        dtype; in half precision with filters of more than 65 taps, after another.
    """
    cos, sin = (None, None) if rotary is None else rotary
    return conv_qkv(qkv, *filters, bias, cos, sin, positions)


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why no kernel here takes tensors of this device and dtype; None if they do."""
    if not INSTALLED:
        return "triton is not installed"
    if device.type != "cuda" and not (device.type == "cpu" and INTERPRETED):
        return f"Triton's kernels need a GPU, and the inputs are on {device.type}"
    if dtype not in DTYPES:
        return f"Triton's kernels sum in fp32, which is too coarse for {dtype}"
    return None


def describe(conv_type: str, dtype: torch.dtype, window: int) -> str:
    """Return how the kernels compute a convolution."""
    interpreter = "Triton's interpreter, slowly: " if INTERPRETED else "Triton: "
    return interpreter + KERNELS[conv_type].describe(dtype, window)


def _describe_head(dtype: torch.dtype, window: int) -> str:
    if uses_dot(dtype, window, False):
        turns = ", rotation by a kernel of its own" if turns_apart(dtype, window) else ""
        return f"banded Toeplitz matrices on matrix units{turns}"
    reason = "fp32 is exact so" if dtype == torch.float32 else f"W is above {WIDEST_DOT_WINDOW}"
    return f"sum over lags ({reason})"


def _describe_depthwise(dtype: torch.dtype, window: int) -> str:
    return "sum over lags (filters per channel)"


def _describe_multihead(dtype: torch.dtype, window: int) -> str:
    precision = "fp32 products" if dtype == torch.float32 else "matrix units"
    return f"block Toeplitz matrices over heads and time, {precision}"


class Kernel(NamedTuple):
    """The operator of a kind of convolution, and how to say what it does."""

    operator: Callable[..., Tensor]
    describe: Callable[[torch.dtype, int], str]


# The kinds that have a kernel.
KERNELS: dict[str, Kernel] = {}
if INSTALLED:
    KERNELS["head"] = Kernel(conv, _describe_head)
    KERNELS["depthwise"] = Kernel(conv, _describe_depthwise)
    KERNELS["multihead"] = Kernel(multihead_conv, _describe_multihead)
