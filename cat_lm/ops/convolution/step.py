"""One token of decoding: all convolutions of a layer, and their rotation, in one kernel on a GPU.

Elsewhere, and where gradients are asked for or a graph is captured, a token is a sequence of one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cat_lm.ops.convolution.backends import serving_backend
from cat_lm.ops.convolution.kinds import KERNEL_NUMBERS
from cat_lm.ops.runtime.operators import is_differentiated
from cat_lm.ops.runtime.triton_launch import (
    INSTALLED,
    contiguous,
    next_power_of_2,
    on_device_of,
)

if INSTALLED:
    from cat_lm.ops.convolution.triton.decode import MOST_LAGS, Step, decode_kernel
    from cat_lm.ops.convolution.triton.launch import angle_arguments, rotated


def can_step(conv_type: str, inputs: Tensor, window: int, backend: str = "auto") -> bool:
    """Return True if `convolve_step` serves for inputs [B, 1, H, …, D] of a model."""
    if torch.compiler.is_compiling() or is_differentiated(inputs) or window < 2:
        return False
    return serving_backend(conv_type, inputs, window, backend) == "triton"


def convolve_step(
    conv_type: str,
    inputs: Sequence[Tensor],
    past: Sequence[Tensor | None],
    filters: Sequence[Tensor | None],
    biases: Sequence[Tensor | None],
    following: Sequence[Tensor | None],
    *,
    window: int,
    rotary: tuple[Tensor, Tensor] | None = None,
    silu: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Convolve the next token of q, k and v, where `can_step`; all sums in fp32, rounded once.

        y_s = RoPE_s(silu(F_s * x_s + b_s))     for s in q, k, v, with RoPE on q and k

    Args:
        conv_type: `head`, `depthwise` or `multihead`.
        inputs: the token's, [B, 1, its heads, D] each, contiguous or parts of one [B, 1, H, 3, D].
        past: the n ≤ W−1 inputs before it, [B, n, its heads, D] each, contiguous or parts of one
            [B, n, H, S, D] of the S streams with filters; None for the others.
        filters: as the operators of their kind take them, or None.
        biases: [its heads, D] or None; contiguous or parts of one [H, 3, D], as the inputs are.
        following: filled with what is `past` for the next token: as that, with n+1 or W−1 rows.
        rotary: cosines and sines, [B or 1, 1, R].
        silu: whether what is convolved passes a SiLU.

    Returns:
        q, k, v, each [B, 1, its heads, D].
    """
    batch, _, query_heads, width = inputs[0].shape
    heads = inputs[1].shape[2]
    outputs = tuple(x.new_empty(x.shape) for x in inputs)
    cos, sin = rotary if rotary is not None else (None, None)
    held, room = (next(x for x in kept if x is not None) for kept in (past, following))
    sizes = heads, held.shape[1], room.shape[1], width, inputs[0].stride(2), held.stride(2)
    lags, columns = min(MOST_LAGS, next_power_of_2(window)), next_power_of_2(width)
    compiled = Step(window, lags, columns, rotated(cos), KERNEL_NUMBERS[conv_type], silu)
    with on_device_of(inputs[0]):
        decode_kernel[(batch * (query_heads + 2 * heads),)](
            x=tuple(inputs),
            past=tuple(past),
            filters=tuple(
                contiguous(None if f is None else f.to(inputs[0].dtype)) for f in filters
            ),
            biases=tuple(biases),
            outputs=outputs,
            following=tuple(following),
            angles=angle_arguments(cos, sin),
            query_heads=query_heads,
            sizes=sizes,
            STEP=compiled,
            num_warps=4,
        )
    return outputs
