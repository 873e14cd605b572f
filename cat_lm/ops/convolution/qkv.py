"""`head_conv_qkv`: from GPT-NeoX's packed projection to what attention reads, in one step.

    y_s = RoPE_s(F_s * x_s + b_s)     for s in q, k, v

with a filter per head, or none, for each stream, and rotary positions on q and k. The convolution
comes before the rotation (CAT, Definition 1: filters act on the embeddings, before attention).
On a GPU this is one kernel each way, or more where the rotation has its own (`rotates_separately`);
elsewhere it is composed of `head_conv` and the rotation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cat_lm.ops.convolution import triton
from cat_lm.ops.convolution.api import (
    check_filters,
    check_rotary,
    check_shapes,
    convolve,
    packed_positions,
    rotate,
)
from cat_lm.ops.convolution.backends import serving_backend
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


def _flops(qkv: Tensor, filters: Sequence[Tensor | None], *_: object, **how: object) -> float:
    """Count as `convolve`."""
    return sum(2.0 * t.shape[1] * qkv[:, :, :, 0].numel() for t in filters if t is not None)


@flops(_flops)
def head_conv_qkv(
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
        qkv: [B, T, H, 3, D], the projection without its bias.
        filters: for q, k and v: [H, W], lag 0 first and of one W, or None for a stream that is not
            convolved; at least one is.
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
    window = _check(qkv, filters, bias, rotary, initial_state)
    backend = serving_backend("head", qkv, window, backend)
    positions = packed_positions(qkv, document_ids, cu_seqlens, positions)
    if backend == "triton" and initial_state is None:
        cast = [None if x is None else x.to(qkv.dtype) for x in (*filters, bias)]
        return triton.convolution.conv_qkv(qkv, *cast, *(rotary or (None, None)), positions)
    outputs = _convolved(qkv, filters, bias, positions, initial_state, backend)
    if rotary is None:
        return outputs
    query, key, value = outputs
    query, key = (rotate(x, *rotary, backend=backend) for x in (query, key))
    return query, key, value


def _convolved(
    qkv: Tensor,
    filters: Sequence[Tensor | None],
    bias: Tensor | None,
    positions: Tensor | None,
    initial_state: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    streams = "".join(s for s, taps in zip("qkv", filters, strict=True) if taps is not None)
    chosen = STREAM_SLICES[streams]
    inputs = qkv[:, :, :, chosen]
    # One call for all streams: [B, T, H, S, D] is [B, T, H·S, D] with H·S filters.
    taps = torch.stack([taps for taps in filters if taps is not None], dim=1).flatten(0, 1)
    convolved = convolve(
        "head",
        inputs.flatten(2, 3),
        taps,
        None if bias is None else bias[:, chosen].flatten(0, 1),
        positions=positions,
        initial_state=None if initial_state is None else initial_state.flatten(2, 3),
        backend=backend,
    )
    found = iter(convolved.unflatten(2, inputs.shape[2:4]).unbind(dim=3))
    outputs = [
        next(found) if taps is not None else unchanged
        for taps, unchanged in zip(filters, qkv.unbind(3), strict=True)
    ]
    if bias is not None:
        for index, taps in enumerate(filters):
            if taps is None:
                outputs[index] = outputs[index] + bias[:, index].to(qkv.dtype)
    return tuple(outputs)


def _check(
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
    windows = {check_filters("head", qkv[:, :, :, 0], taps) for taps in given}
    if len(windows) > 1:
        raise ValueError(f"the filters have windows {sorted(windows)}; they must be equal")
    window = windows.pop()
    state = (batch, window - 1, heads, len(given), width)
    check_shapes(bias=(bias, (heads, 3, width)), initial_state=(initial_state, state))
    check_rotary(rotary, batch, time, width)
    return window
