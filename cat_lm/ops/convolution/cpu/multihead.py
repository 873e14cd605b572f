"""The multi-head convolution as matrix products over heads and time.

    y[b,t,i,:] = sum_h sum_j F[j,i,h] x[b,t−j,h,:],     F [W, H_out, H_in], lag 0 first

(CAT, section 3.1: a filter F of W × H × H on the embeddings of all heads). In memory, C time steps
of all heads of one row are a matrix [C·H, D]. A block of C outputs is one matrix, the same for
every block, times the K = C+W−1 steps that it can see, which are a view of x:

    Y[n] = M X[n],   M[(i,o), (k,h)] = F[i + W−1 − k, o, h]   (0 where that lag is not in 0 … W−1).

dX is the same with time reversed, dM = sum over n of dY[n] X[n]ᵀ, whose diagonals sum to dF. Blocks
that a document's border touches are few, and get matrices of their own.

Shapes: B batch, T time, H heads, D head dim, W window, C block, N blocks a row, K = C+W−1.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

ROWS = 128  # rows of M to aim at: enough for matrix units, few zeros multiplied
BORDER_NUMBERS = 1 << 22  # numbers in the border blocks' own matrices at a time


def forward(x: Tensor, filters: Tensor, bias: Tensor | None, positions: Tensor | None) -> Tensor:
    """y [B, T, H, D] of x [B, T, H, D], filters [W, H, H], bias [H, D]; positions [B, T]."""
    window = filters.shape[0]
    return _convolve(x, filters.flip(0), window - 1, bias, positions)


def input_gradient(dy: Tensor, filters: Tensor, positions: Tensor | None) -> Tensor:
    """dx[b,t,h,:] = sum_i sum_j F[j,i,h] dy[b,t+j,i,:]."""
    return _convolve(dy, filters.mT, 0, None, positions)


def filter_gradient(dy: Tensor, x: Tensor, window: int, positions: Tensor | None) -> Tensor:
    """dF[j,i,h] = sum_{b,t,d} dy[b,t,i,d] x[b,t−j,h,d], summed in fp32 or wider: [W, H, H]."""
    heads = x.shape[2]
    block = _block_length(x.shape[1], window, heads)
    inputs = _windows(x, block, block + window - 1, window - 1, window)
    outputs = _windows(dy, block, block, 0, window)  # [B·N, C·H, D]
    sums = torch.promote_types(x.dtype, torch.float32)
    total = torch.zeros(block * heads, inputs.shape[1], dtype=sums)
    for chosen, mask in _borders(positions, block, window, window - 1, heads):
        own = torch.bmm(outputs[chosen], inputs[chosen].mT) * mask
        total += own.sum(dim=0, dtype=sums)
        outputs[chosen] = 0
    # Blocks and channels are one long inner dimension.
    flat = (part.transpose(0, 1).reshape(part.shape[1], -1) for part in (outputs, inputs))
    left, right = flat
    total += left @ right.mT
    # Lag j of output step i meets input step i + W−1 − j: diagonals of [C, K] blocks [H, H].
    steps, reach = heads * heads * (block + window - 1), heads * heads
    total = total.view(block, heads, -1, heads).transpose(1, 2).contiguous()
    bands = total.as_strided((block, window, heads, heads), (steps + reach, reach, heads, 1))
    return bands.sum(dim=0).flip(0)


def _convolve(
    x: Tensor, taps: Tensor, before: int, bias: Tensor | None, positions: Tensor | None
) -> Tensor:
    """bias + sum_k taps[k,i,h] x[b, t − before + k, h], rounded once, within documents."""
    batch, time, heads, width = x.shape
    window = taps.shape[0]
    block = _block_length(time, window, heads)
    inputs = _windows(x, block, block + window - 1, before, window)
    matrix = _matrix(taps, block)

    def outputs(matrices: Tensor, inputs: Tensor) -> Tensor:
        matrices = matrices.expand(inputs.shape[0], -1, -1)
        if bias is None:
            return torch.bmm(matrices, inputs)
        start = bias.repeat(block, 1).expand(inputs.shape[0], -1, -1)
        return torch.baddbmm(start, matrices, inputs)

    y = outputs(matrix, inputs)  # [B·N, C·H, D]
    for chosen, mask in _borders(positions, block, window, before, heads):
        y[chosen] = outputs(matrix * mask, inputs[chosen])
    return y.view(batch, -1, heads, width)[:, :time]


def _block_length(time: int, window: int, heads: int) -> int:
    """C: about ROWS rows, but blocks not much shorter than windows, as those are read again."""
    return min(time, max(ROWS // heads, window // 2, 4))


def _matrix(taps: Tensor, block: int) -> Tensor:
    """[W, H, H] to [C·H, K·H]: row block i holds the taps from column block i on."""
    window, heads, _ = taps.shape
    blank = taps.new_zeros(block, block + window - 1, heads, heads)
    steps = heads * heads
    bands = blank.as_strided(
        (block, window, heads, heads), ((block + window) * steps, steps, heads, 1)
    )
    bands.copy_(taps.expand(block, -1, -1, -1))
    return blank.transpose(1, 2).reshape(block * heads, -1)


def _windows(x: Tensor, block: int, steps: int, before: int, window: int) -> Tensor:
    """`steps` steps around each block, from `before` before it: a view [B·N, steps·H, D].

    Rows stand one after the other, drawn apart by whole blocks of zeros that make W−1 or more, so
    that all blocks are equally far from each other.
    """
    batch, time, heads, width = x.shape
    blocks = -(-(time + window - 1) // block)
    flat = x.new_zeros(batch * blocks * block + window - 1, heads, width)
    rows = flat[before : before + batch * blocks * block].view(batch, -1, heads, width)
    rows[:, :time] = x
    shape = (batch * blocks, steps * heads, width)
    return flat.as_strided(shape, (block * heads * width, width, 1))


def _borders(
    positions: Tensor | None, block: int, window: int, before: int, heads: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks with inputs of other documents: their numbers [M] and masks [M, C·H, K·H]."""
    if positions is None:
        return
    # Documents are numbered, and what is outside of a row is of none.
    runs = (positions == 0).cumsum(dim=1)[:, :, None, None]
    outputs = _windows(runs, block, block, 0, window)  # [B·N, C, 1]
    inputs = _windows(runs, block, block + window - 1, before, window)  # [B·N, K, 1]
    same = outputs == inputs.mT
    offset = torch.arange(block + window - 1) - torch.arange(block)[:, None]
    # A pair that no tap joins, or with the zeros around a row, needs no mask.
    harmless = (offset < 0) | (offset >= window) | (outputs == 0) | (inputs.mT == 0)
    chosen = (~(same | harmless)).flatten(1).any(dim=1).nonzero().flatten()
    at_once = max(1, BORDER_NUMBERS // (same[0].numel() * heads * heads))
    for part in chosen.split(at_once):
        mask = same[part].repeat_interleave(heads, 1).repeat_interleave(heads, 2)
        yield part, mask
