"""`head_conv`, `depthwise_conv`, `multihead_conv` and `rotate`: checks, documents, state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.ops.convolution import kinds, triton
from cat_lm.ops.convolution.backends import BACKENDS, serving_backend
from cat_lm.ops.convolution.kinds import Kind, reference
from cat_lm.ops.runtime import triton_launch
from cat_lm.ops.runtime.documents import (
    check_document_ids,
    document_positions,
    positions_of_starts,
    starts_of_lengths,
)
from cat_lm.ops.runtime.flops import flops


class ConvolutionOptions(TypedDict, total=False):
    """Keyword arguments of the three convolutions; `convolve` says what they are."""

    document_ids: Tensor | None
    cu_seqlens: Tensor | None
    initial_state: Tensor | None
    return_state: bool
    backend: str


def head_conv(
    x: Tensor, filters: Tensor, bias: Tensor | None = None, **options: Unpack[ConvolutionOptions]
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal convolution along time, with one filter for each head.

        y[b,t,h,:] = bias[h,:] + sum_{j=0}^{W−1} F[h,j] x[b,t−j,h,:],

    where inputs before the start, and those of another document, are zeros.

    Args:
        filters: [H, W], lag 0 first.
        x, bias, options: as in `convolve`, whose results and errors these are.
    """
    return convolve("head", x, filters, bias, **options)


def depthwise_conv(
    x: Tensor, filters: Tensor, bias: Tensor | None = None, **options: Unpack[ConvolutionOptions]
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal convolution along time, with one filter for each channel.

        y[b,t,h,d] = bias[h,d] + sum_{j=0}^{W−1} F[h,d,j] x[b,t−j,h,d]

    The short convolution of Primer, Mamba and DeltaNet, and of Canon layers at position B
    (arXiv:2512.17351).

    Args:
        filters: [H, D, W], lag 0 first.
        x, bias, options: as in `convolve`, whose results and errors these are.
    """
    return convolve("depthwise", x, filters, bias, **options)


def multihead_conv(
    x: Tensor, filters: Tensor, bias: Tensor | None = None, **options: Unpack[ConvolutionOptions]
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal convolution along time that mixes heads, with one filter for each pair of heads.

        y[b,t,i,:] = bias[i,:] + sum_h sum_{j=0}^{W−1} F[j,i,h] x[b,t−j,h,:]

    Args:
        filters: [W, H, H]: lag (0 first), output head, input head.
        x, bias, options: as in `convolve`, whose results and errors these are.
    """
    return convolve("multihead", x, filters, bias, **options)


def _flops(conv_type: str | Kind, x: Tensor, filters: Tensor, *_: object, **how: object) -> float:
    """Return two operations for each product of a filter tap and an input."""
    kind = kinds.of(conv_type)
    return 2.0 * kind.fan_in(x.shape[2], kind.window_of(filters)) * x.numel()


@flops(_flops)
def convolve(
    conv_type: str | Kind,
    x: Tensor,
    filters: Tensor,
    bias: Tensor | None = None,
    *,
    rotary: tuple[Tensor, Tensor] | None = None,
    document_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    positions: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolve x along time by filters of any kind, after what stood before it, within documents.

    (Backends that multiply matrices do so with exact zeros: there, infinities and NaN do spread
    within a block of time.)

    Args:
        conv_type: the kind's name; or a kind with options, which has no kernel.
        x: [B, T, H, D], with any strides.
        filters: of the shape that the kind says. Used in the dtype of x, as a linear layer's weight
            is under autocast; products are summed in fp32 where x has half precision.
        bias: [H, D].
        rotary: cosines and sines, [B or 1, T, R] each, by which the results are turned as `rotate`
            does; they get no gradient.
        document_ids: [B, T] integers; a change of the id starts a new document.
        cu_seqlens: [N+1] integers, the same said as flash attention says it: the borders of N
            documents in the B rows joined end to end, from 0 to B·T. A row starts a document.
        positions: [B, T] int32, each token's in its document: what `document_ids` or `cu_seqlens`
            say, which are not read then. For who convolves often with the same documents.
        initial_state: [B, W−1, H, D], the inputs before x; zeros if absent.
        return_state: also return the last W−1 inputs, [B, W−1, H, D], to go on from.
        backend: auto, reference, cpu or triton; see `choose_backend`.

    Returns:
        y [B, T, H, D] in the dtype of x, or (y, state). Differentiable in x, filters, bias and
        initial_state, once; `reference` also twice, and under torch.func.

    Raises:
        ValueError: shapes that do not fit, a backend that cannot serve, or documents together with
            a state, which belongs to no document.
    """
    window = check_filters(conv_type, x, filters)
    state = (x.shape[0], window - 1, *x.shape[2:])
    check_shapes(bias=(bias, x.shape[2:]), initial_state=(initial_state, state))
    check_rotary(rotary, *x.shape[:2], x.shape[3])
    positions = packed_positions(x, document_ids, cu_seqlens, positions)
    if positions is not None and (initial_state is not None or return_state):
        raise ValueError("packed documents cannot be used together with a state")
    serving = BACKENDS.get(serving_backend(kinds.of(conv_type).name, x, window, backend))
    past = 0
    if initial_state is not None:
        x, past = torch.cat([initial_state.to(x.dtype), x], dim=1), window - 1
    bias = None if bias is None else bias.to(x.dtype)
    inputs = conv_type, x, filters.to(x.dtype), bias, positions
    if kinds.of(conv_type).name in serving.rotates and rotary is not None and not past:
        y = serving.convolve(*inputs, rotary)
    else:
        y = serving.convolve(*inputs)
        if past:
            y = y[:, past:]
        if rotary is not None:
            y = rotate(y, *rotary, backend=serving.name)
    return (y, _last_inputs(x, window)) if return_state else y


def centred_conv(x: Tensor, filters: Tensor, *, backend: str = "auto") -> Tensor:
    """Convolve x [B, T, H, D] by filters [H, W], W odd, whose middle tap is a position's own.

    For encoders, never for what predicts tokens.

    `head_conv` of x moved (W − 1)/2 steps to the past; zeros are read beyond both ends.

    Raises:
        ValueError: a window without a middle.
    """
    window = filters.shape[-1]
    if window % 2 == 0:
        raise ValueError(f"window={window}: a centred filter needs an odd number of taps")
    ahead = window // 2
    padded = F.pad(x, (0, 0, 0, 0, 0, ahead))
    return head_conv(padded, filters, backend=backend)[:, ahead:]


def rotate(x: Tensor, cosines: Tensor, sines: Tensor, backend: str = "auto") -> Tensor:
    """Rotary positions on the first R channels of x [B, T, H, D], by halves (GPT-NeoX).

        y[r] = x[r] cos[r] − x[r + R/2] sin[r],   y[r + R/2] = x[r + R/2] cos[r + R/2] + x[r] sin[…]

    for r < R/2, with cosines and sines [B or 1, T, R]; the other channels pass. On a GPU it is one
    kernel each way, which rounds once and keeps nothing of x for the backward pass; the angles get
    no gradient of it.

    Args:
        backend: auto or triton for that kernel, where it can serve; torch's operators otherwise.
    """
    by_kernel = backend == "triton" or (backend == "auto" and x.device.type != "cpu")
    if by_kernel and cosines.shape[-1] > 0 and triton_launch.why_not(x.device, x.dtype) is None:
        return triton.rotate(x, cosines, sines)
    return reference.rotate(x, cosines, sines)


def check_rotary(
    rotary: tuple[Tensor, Tensor] | None, batch: int, time: int, head_dim: int
) -> None:
    """Check cosines and sines, [B or 1, T, R] each. Raises ValueError."""
    for angles in rotary or ():
        rotated = angles.shape[-1]
        rows = angles.shape[0] if angles.ndim == 3 else 0
        if rows not in (1, batch) or angles.shape[1] != time or rotated % 2 or rotated > head_dim:
            raise ValueError(
                f"rotary must be cosines and sines of [{batch} or 1, {time}, R] with R even and at "
                f"most {head_dim}, not {list(angles.shape)}"
            )


def check_filters(conv_type: str | Kind, x: Tensor, filters: Tensor) -> int:
    """Return W of filters that fit x [B, T, H, D]; raise ValueError for those that do not."""
    if x.ndim != 4 or 0 in x.shape:
        raise ValueError(f"x must be [B, T, H, D] and not empty, not {list(x.shape)}")
    kind, (heads, width) = kinds.of(conv_type), x.shape[2:]
    window = filters.shape[kind.window_axis] if filters.ndim == len(kind.filter_axes) else 0
    expected = kind.filter_shape(heads, width, window)
    if window < 1 or tuple(filters.shape) != expected:
        named = zip(kind.filter_axes, expected, strict=True)
        shape = ", ".join("W" if axis == "W" else str(size) for axis, size in named)
        raise ValueError(
            f"filters must be [{shape}] with W >= 1 for x {list(x.shape)}, "
            f"not {list(filters.shape)}"
        )
    return window


def packed_positions(
    x: Tensor,
    document_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    positions: Tensor | None = None,
) -> Tensor | None:
    """[B, T] int32, the position of each token in its document; None if rows are not packed.

    Args:
        x: [B, T, …].
        document_ids, cu_seqlens: as in `head_conv`; at most one of them.
        positions: the result, if it is known.
    """
    batch, time = x.shape[:2]
    if positions is not None:
        if positions.dtype != torch.int32 or tuple(positions.shape) != (batch, time):
            raise ValueError(
                f"positions must be {[batch, time]} int32, not {list(positions.shape)} "
                f"{positions.dtype}"
            )
        return positions
    if document_ids is not None and cu_seqlens is not None:
        raise ValueError("give document_ids or cu_seqlens, not both")
    if document_ids is not None:
        check_document_ids(document_ids, batch, time)
        return document_positions(document_ids).int()
    if cu_seqlens is not None:
        return positions_of_starts(starts_of_lengths(cu_seqlens, batch, time)).int()
    return None


def _last_inputs(x: Tensor, window: int) -> Tensor:
    missing = max(0, window - 1 - x.shape[1])
    last = x[:, max(0, x.shape[1] - window + 1) :]
    return F.pad(last, (0, 0, 0, 0, missing, 0))


def check_shapes(**given: tuple[Tensor | None, Sequence[int]]) -> None:
    """Raise ValueError for a tensor, by its name, that is there and has another shape."""
    for name, (tensor, shape) in given.items():
        if tensor is not None and list(tensor.shape) != list(shape):
            raise ValueError(f"{name} must be {list(shape)}, not {list(tensor.shape)}")
