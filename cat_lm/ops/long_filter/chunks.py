"""A chunk of a long convolution as four matrices, and chunk after chunk in plain torch.

With X [L, D] the chunk's inputs and S [K, D] the state before it:

    Y = taps X + read S,   S' = carry S + write X

taps [L, L] is lower triangular with F_j on its j-th diagonal; K = N, a decay's number or the two of
a turning pair.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.ops.long_filter.filters import Modes


class Chunk(NamedTuple):
    """The matrices of H heads for chunks of L tokens."""

    taps: Tensor  # [H, L, L]
    read: Tensor  # [H, L, K]
    write: Tensor  # [H, K, L]
    carry: Tensor  # [H, K, K]


def decay_factors(modes: Modes, lags: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return e^{−j rate} times cos and sin of j angle, [H, M, lags]; None for sin if nothing
    rotates.
    """
    lags = lags.to(modes.rate.dtype)
    decay = (-modes.rate[..., None] * lags).exp()
    if modes.angle is None:
        return decay, None
    angle = modes.angle[..., None] * lags
    return decay * angle.cos(), decay * angle.sin()


def taps_of(modes: Modes, length: int) -> Tensor:
    """Return the taps F_0 … F_{length−1} of each head, [H, length]."""
    cosines, sines = decay_factors(modes, torch.arange(length, device=modes.rate.device))
    taps = (modes.real[..., None] * cosines).sum(1)
    if sines is not None:
        taps = taps - (modes.imaginary[..., None] * sines).sum(1)
    return taps + torch.cat([modes.now[:, None], taps.new_zeros(len(taps), length - 1)], dim=1)


def chunk_of(modes: Modes, length: int) -> Chunk:
    """Make the matrices of chunks of `length` tokens, of which the gradients are autograd's."""
    steps = torch.arange(length, device=modes.rate.device)
    lags = steps[:, None] - steps
    taps = taps_of(modes, length)[:, lags.clamp(min=0)].masked_fill(lags < 0, 0.0)
    kept, turned = decay_factors(modes, torch.arange(length + 1, device=modes.rate.device))
    read, write, carry = kept[..., 1:], kept[..., :-1].flip(2), kept[..., -1]
    if turned is None:
        return Chunk(taps, (modes.real[..., None] * read).mT, write, torch.diag_embed(carry))
    real, imaginary = modes.real[..., None], modes.imaginary[..., None]
    sines = turned[..., 1:]
    read = torch.cat([real * read - imaginary * sines, -real * sines - imaginary * read], dim=1)
    write = torch.cat([write, turned[..., :-1].flip(2)], dim=1)
    cosine, sine = torch.diag_embed(carry), torch.diag_embed(turned[..., -1])
    rows = torch.cat([cosine, -sine], dim=2), torch.cat([sine, cosine], dim=2)
    return Chunk(taps, read.mT, write, torch.cat(rows, dim=1))


def document_factors(positions: Tensor | None, length: int, dtype: torch.dtype) -> Chunk:
    """Return the factors 0 and 1 that restrict a chunk's matrices to documents; None without
    documents.

    A token at place l of its chunk and p of its document reads lag j if j ≤ p, and so the state
    before the chunk if l < p; the state after it has what the last token may read.

    Args:
        positions: places in documents [B, T].

    Returns:
        [B, C, 1, L, L], [B, C, 1, L, 1], [B, C, 1, 1, L] and [B, C, 1, 1, 1].
    """
    if positions is None:
        return Chunk(None, None, None, None)
    positions = F.pad(positions, (0, -positions.shape[1] % length))
    positions = positions.unflatten(1, (-1, length))[:, :, None]
    steps = torch.arange(length, device=positions.device)
    last = positions[..., -1:]
    return Chunk(
        ((steps[:, None] - steps) <= positions[..., None]).to(dtype),
        (positions > steps).to(dtype)[..., None],
        ((length - 1 - steps) <= last).to(dtype)[..., None, :],
        (last >= length).to(dtype)[..., None],
    )


def _split_chunks(x: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Reshape [B, T, H, D] to padded chunks [B, C, H, L, D]."""
    behind = -x.shape[1] % length
    x = F.pad(x.to(dtype), (0, 0, 0, 0, 0, behind))
    return x.unflatten(1, (-1, length)).transpose(2, 3)


def _join_chunks(x: Tensor, like: Tensor) -> Tensor:
    """Join chunks [B, C, H, L, D] to [B, T, H, D] in the dtype of `like`."""
    return x.transpose(2, 3).flatten(1, 2)[:, : like.shape[1]].to(like.dtype).contiguous()


def _apply(matrix: Tensor, border: Tensor | None, x: Tensor) -> Tensor:
    """Return matrix [H, n, m] times x [B, C, H, m, D], within documents."""
    if border is None:
        return torch.einsum("hnm,bchmd->bchnd", matrix, x)
    return (matrix * border) @ x


def _outer_sums(y: Tensor, x: Tensor, border: Tensor | None) -> Tensor:
    """Return Σ y [B, C, H, n, D] times x [B, C, H, m, D] over all but heads, [H, n, m]."""
    if border is None:
        return torch.einsum("bchnd,bchmd->hnm", y, x)
    return ((y @ x.mT) * border).sum((0, 1))


def forward(
    x: Tensor, chunk: Chunk, positions: Tensor | None, initial: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Convolve x [B, T, H, D] after the state `initial` [B, H, K, D].

    Returns:
        y as x; the state after the last whole chunk, zeros filling it up; and the states before
        every chunk, [B, C, H, K, D]. Sums and states have the dtype of the matrices.
    """
    dtype, length = chunk.taps.dtype, chunk.taps.shape[1]
    inputs = _split_chunks(x, length, dtype)
    taps, read, write, carry = document_factors(positions, length, dtype)
    added = _apply(chunk.write, write, inputs)
    # A contiguous tensor, unlike the einsum's: compiled graphs rely on the strides.
    kept = added.new_empty(added.shape)
    state = initial.to(dtype)
    for number in range(inputs.shape[1]):
        kept[:, number] = state
        passed = chunk.carry @ state
        passed = passed if carry is None else passed * carry[:, number]
        state = passed + added[:, number]
    y = _apply(chunk.taps, taps, inputs) + _apply(chunk.read, read, kept)
    return _join_chunks(y, x), state, kept


def backward(
    dy: Tensor, dlast: Tensor, x: Tensor, chunk: Chunk, positions: Tensor | None, kept: Tensor
) -> tuple[Tensor, Chunk, Tensor]:
    """Compute the gradients of x, of the matrices, and of the first state."""
    dtype, length = chunk.taps.dtype, chunk.taps.shape[1]
    inputs, grads = _split_chunks(x, length, dtype), _split_chunks(dy, length, dtype)
    taps, read, write, carry = document_factors(positions, length, dtype)
    transposed = [None if border is None else border.mT for border in (taps, read, write)]
    read_back = _apply(chunk.read.mT, transposed[1], grads)
    flows = torch.empty_like(kept)  # gradients of the states after every chunk
    flow = dlast.to(dtype)
    for number in reversed(range(inputs.shape[1])):
        flows[:, number] = flow
        passed = chunk.carry.mT @ flow
        passed = passed if carry is None else passed * carry[:, number]
        flow = passed + read_back[:, number]
    dx = _apply(chunk.taps.mT, transposed[0], grads) + _apply(chunk.write.mT, transposed[2], flows)
    found = Chunk(
        _outer_sums(grads, inputs, taps),
        _outer_sums(grads, kept, read),
        _outer_sums(flows, inputs, write),
        _outer_sums(flows, kept, carry),
    )
    return _join_chunks(dx, x), found, flow
