"""`convolve_qkv`: from GPT-NeoX's packed projection to what attention reads, in one step.

    y_s = RoPE_s(F_s * x_s + b_s)     for s in q, k, v

with filters, or none, for each stream, and rotary positions on q and k. The convolution comes
before the rotation (CAT, Definition 1: filters act on the embeddings, before attention). Where the
backend has a kernel for it (`Backend.packs`), the streams are read from the projection and their
gradients written into its own; on a GPU the rotation may be another (`rotates_separately`).
Elsewhere it is composed of `convolve` and the rotation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack

from torch import Tensor

from cat_lm.ops.convolution import kinds
from cat_lm.ops.convolution.api import (
    check_filters,
    check_rotary,
    check_shapes,
    convolve,
    packed_positions,
    rotate,
)
from cat_lm.ops.convolution.backends import BACKENDS, serving_backend
from cat_lm.ops.runtime.flops import flops

# Each choice of streams as a slice of the dimension (q, k, v), so that choosing copies nothing.
STREAM_SLICES = {
    "q": slice(0, 1),
    "k": slice(1, 2),
    "v": slice(2, 3),
    "qk": slice(0, 2),
    "kv": slice(1, 3),
    "qv": slice(0, 3, 2),
    "qkv": slice(0, 3),
}


class PackedOptions(TypedDict, total=False):
    """Keyword arguments of `convolve_qkv`, which says what they are."""

    rotary: tuple[Tensor, Tensor] | None
    document_ids: Tensor | None
    cu_seqlens: Tensor | None
    positions: Tensor | None
    initial_state: Tensor | None
    backend: str


def head_conv_qkv(
    qkv: Tensor,
    filters: Sequence[Tensor | None],
    bias: Tensor | None = None,
    **options: Unpack[PackedOptions],
) -> tuple[Tensor, Tensor, Tensor]:
    """Convolve, bias and rotate queries, keys and values, with one filter for each head.

    Args:
        filters: for q, k and v: [H, W], lag 0 first and of one W, or None for a stream that is not
            convolved; at least one is.
        qkv, bias, options: as in `convolve_qkv`, whose results and errors these are.
    """
    return convolve_qkv("head", qkv, filters, bias, **options)


def _flops(
    conv_type: str, qkv: Tensor, filters: Sequence[Tensor | None], *_: object, **how: object
) -> float:
    """Count as `convolve`."""
    kind, x = kinds.get(conv_type), qkv[:, :, :, 0]
    given = [taps for taps in filters if taps is not None]
    return sum(2.0 * kind.fan_in(x.shape[2], kind.window_of(t)) * x.numel() for t in given)


@flops(_flops)
def convolve_qkv(
    conv_type: str,
    qkv: Tensor,
    filters: Sequence[Tensor | None],
    bias: Tensor | None = None,
    *,
    rotary: tuple[Tensor, Tensor] | None = None,
    document_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    positions: Tensor | None = None,
    initial_state: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Convolve, bias and rotate queries, keys and values.

    Args:
        conv_type: the kind's name.
        qkv: [B, T, H, 3, D], the projection without its bias.
        filters: for q, k and v: of the shape that the kind says and of one W, or None for a stream
            that is not convolved; at least one is.
        bias: [H, 3, D].
        rotary: (cosines, sines), each [B or 1, T, R], that turn the first R channels of q and k
            by halves, channel r with channel r + R/2; None for no positions.
        document_ids, cu_seqlens: as in `head_conv`.
        positions: as in `convolve`.
        initial_state: [B, W−1, H, S, D], the inputs before these of the S convolved streams.
        backend: auto, reference, cpu or triton.

    Returns:
        q, k, v, each [B, T, H, D]; on a CPU laid out as [B, H, T, D] in memory where that is free,
        which is how attention reads them there.

    Raises:
        ValueError: as `head_conv`, and for filters of different windows.
    """
    window = _check(conv_type, qkv, filters, bias, rotary, initial_state)
    serving = BACKENDS.get(serving_backend(conv_type, qkv, window, backend))
    positions = packed_positions(qkv, document_ids, cu_seqlens, positions)
    if conv_type in serving.packs and initial_state is None:
        cast = [None if x is None else x.to(qkv.dtype) for x in (*filters, bias)]
        return serving.convolve_packed(conv_type, qkv, *cast, positions, *(rotary or (None, None)))
    biases = [None] * 3 if bias is None else bias.unbind(1)
    earlier = iter(() if initial_state is None else initial_state.unbind(3))
    made = []
    for stream, x, taps, own in zip("qkv", qkv.unbind(3), filters, biases, strict=True):
        angles = None if stream == "v" else rotary
        if taps is not None:
            how = {"initial_state": next(earlier, None), "backend": serving.name}
            x = convolve(conv_type, x, taps, own, rotary=angles, positions=positions, **how)
        else:
            x = x if own is None else x + own.to(x.dtype)
            x = x if angles is None else rotate(x, *angles, backend=serving.name)
        made.append(x)
    return tuple(made)


def _check(
    conv_type: str,
    qkv: Tensor,
    filters: Sequence[Tensor | None],
    bias: Tensor | None,
    rotary: tuple[Tensor, Tensor] | None,
    initial_state: Tensor | None,
) -> int:
    """Check the arguments, and return the common window W of the filters."""
    if qkv.ndim != 5 or qkv.shape[3] != 3:
        raise ValueError(f"qkv must be [B, T, H, 3, D], not {list(qkv.shape)}")
    batch, time, heads, _, width = qkv.shape
    given = [taps for taps in filters if taps is not None]
    if len(filters) != 3 or not given:
        raise ValueError("filters must be three, for q, k and v, and at least one not None")
    windows = {check_filters(conv_type, qkv[:, :, :, 0], taps) for taps in given}
    if len(windows) > 1:
        raise ValueError(f"the filters have windows {sorted(windows)}; they must be equal")
    window = windows.pop()
    state = (batch, window - 1, heads, len(given), width)
    check_shapes(bias=(bias, (heads, 3, width)), initial_state=(initial_state, state))
    check_rotary(rotary, batch, time, width)
    return window
