"""The backend for CPU tensors: a C++ kernel, compiled at first use.

Where no C++ compiler is at hand, or it fails, plain torch computes the same: matrix products for
`head` and `multihead`, shifted sums for `depthwise`. The choice is made inside of one operator, so
nothing is built while torch.compile traces.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cat_lm.ops.convolution.cpu.kernel import DTYPES, library
from cat_lm.ops.convolution.cpu.operators import cpu_conv


def convolve(
    conv_type: str, x: Tensor, filters: Tensor, bias: Tensor | None, positions: Tensor | None
) -> Tensor:
    """A causal convolution along time, differentiable in x, filters and bias.

    Sums, also those of the gradients, are in fp32 (fp64 for fp64), in an order that does not
    depend on the number of threads.

    Args:
        conv_type: `head`, `depthwise` or `multihead`.
        x: [B, T, H, D], with any strides.
        filters: [H, W], [H, D, W] or [W, H, H], in the dtype of x; lag 0 first.
        bias: [H, D] in the dtype of x, or None.
        positions: None, or [B, T] int32: of each token in its document, 0 at its start and one
            more at each step.

    Returns:
        y [B, T, H, D]; for head and depthwise [B, H, T, D] in memory, as attention reads it.
    """
    return cpu_conv(conv_type, x, filters, bias, positions)


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this backend cannot serve, as a clause, or None if it can."""
    if device.type != "cpu":
        return f"it is for CPU tensors, not {device.type}"
    if dtype not in DTYPES:
        return f"it has no arithmetic for {dtype}"
    return None


def describe(conv_type: str, dtype: torch.dtype, window: int) -> str:
    """Return what runs and why. Builds the kernel if it was not yet."""
    built = library()
    if built.handle is not None:
        return f"C++ kernel ({built.reason})"
    instead = "shifted sums" if conv_type == "depthwise" else "matrix products"
    return f"{instead}, as {built.reason}"
