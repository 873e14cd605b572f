"""The convolution per head as matrix products with a banded Toeplitz matrix.

This serves where no C++ compiler is at hand. The channels of a head share their filter, so a block
of C outputs of head h is a small matrix, the same for every block, times the C+W−1 inputs that the
block can see:

    Y[n] = M[h] X[n],   M[h][i, k] = F[h, i + W−1 − k]  (0 where that lag is not in 0 … W−1),

with X[n][k] = x[n·C − (W−1) + k]. The gradients are products with the same matrices:
dX[n] = M[h]ᵀ dY[n], overlapping parts added, and dM[h] = sum over n of dY[n] X[n]ᵀ, whose diagonals
sum to dF. The same input gives the same gradients.

Document borders are zeros in M, which then differs from block to block. A product with an exact
zero leaves no trace of the other document, if that is finite.

Shapes: B batch, T time, H heads, D head dim, W window, C block, N blocks, K = C+W−1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

# Longer blocks multiply more zeros, shorter ones read more inputs twice; 32 was fastest on x86 in
# fp32 and bf16 for W=21, and 16 to 64 are close.
BLOCK = 32


def forward(x: Tensor, filters: Tensor, bias: Tensor | None, positions: Tensor | None) -> Tensor:
    """y[b,t,h,:] = bias[h,:] + sum_j F[h,j] x[b,t−j,h,:], all of one dtype.

    x is [B, T, H, D], filters [H, W], bias [H, D]; `positions` [B, T] are those of the tokens in
    their documents. In half precision the bias is added to a rounded sum. The result is laid out as
    [B, H, T, D] in memory, which is how attention reads it.
    """
    block = block_length(x.shape[1], filters.shape[1])
    inputs = windows_of(x, block, filters.shape[1])
    outputs = torch.matmul(_matrices(filters, positions, block), inputs)
    y = _time_second(outputs, x.shape[1])
    return y if bias is None else y.add_(bias)


def input_gradient(dy: Tensor, filters: Tensor, positions: Tensor | None) -> Tensor:
    """dx[b,t,h,:] = sum_j F[h,j] dy[b,t+j,h,:]."""
    time, window = dy.shape[1], filters.shape[1]
    block = block_length(time, window)
    parts = torch.matmul(_matrices(filters, positions, block).mT, blocks_of(dy, block))
    dx = parts[..., window - 1 :, :].contiguous()  # [B, H, N, C, D]
    if window > 1 and parts.shape[2] > 1:
        # What a block's first W−1 inputs received belongs to the end of the block before it.
        dx[:, :, :-1, block - window + 1 :] += parts[:, :, 1:, : window - 1]
    return _time_second(dx, time)


def filter_gradient(dy: Tensor, x: Tensor, window: int, positions: Tensor | None) -> Tensor:
    """dF[h,j] = sum_{b,t,d} dy[b,t,h,d] x[b,t−j,h,d], summed in fp32 or wider: [H, W]."""
    block = block_length(x.shape[1], window)
    outputs, inputs = blocks_of(dy, block), windows_of(x, block, window)
    sum_dtype = torch.promote_types(x.dtype, torch.float32)
    if positions is None:
        # Blocks and channels are one long inner dimension: [H, C, B·N·D] and [H, K, B·N·D].
        outputs, inputs = (
            part.permute(1, 3, 0, 2, 4).reshape(part.shape[1], part.shape[3], -1)
            for part in (outputs, inputs)
        )
        products = torch.bmm(outputs, inputs.mT).to(sum_dtype)
    else:
        products = torch.matmul(outputs, inputs.mT) * _same_document(positions, block, window)
        products = products.sum(dim=(0, 2), dtype=sum_dtype)
    return sum_of_diagonals(products, window)


def block_length(time: int, window: int) -> int:
    """C: one block for short inputs, otherwise at least W−1, so that blocks overlap by pairs."""
    return min(time, max(BLOCK, window - 1))


def banded_toeplitz(filters: Tensor, block: int) -> Tensor:
    """M: [H, W] filters to [H, C, K]."""
    window = filters.shape[1]
    diagonals = F.pad(filters.flip(1), (block - 1, block - 1))
    # Row i of M starts C−1−i into the padded, reversed filter: the windows in reverse order.
    return diagonals.unfold(1, block + window - 1, 1).flip(1)


def sum_of_diagonals(matrix: Tensor, window: int) -> Tensor:
    """The transpose of `banded_toeplitz`: [H, C, K] to [H, W]."""
    matrix = matrix.contiguous()
    heads, block, width = matrix.shape
    bands = matrix.as_strided(
        (heads, block, window), (block * width, width + 1, 1), matrix.storage_offset()
    )
    return bands.sum(dim=1).flip(1)


def blocks_of(y: Tensor, block: int) -> Tensor:
    """[B, T, H, D] to [B, H, N, C, D], zeros after the end."""
    missing = -y.shape[1] % block
    if missing:
        y = F.pad(y, (0, 0, 0, 0, 0, missing))
    return y.unflatten(1, (-1, block)).permute(0, 3, 1, 2, 4)


def windows_of(x: Tensor, block: int, window: int) -> Tensor:
    """Return what each block can see: [B, T, H, D] to [B, H, N, K, D]."""
    missing = -x.shape[1] % block
    padded = F.pad(x, (0, 0, 0, 0, window - 1, missing))
    return padded.unfold(1, block + window - 1, block).permute(0, 2, 1, 4, 3)


def _matrices(filters: Tensor, positions: Tensor | None, block: int) -> Tensor:
    """M as [H, 1, C, K], or with documents [B, H, N, C, K]."""
    matrices = banded_toeplitz(filters, block)[:, None]
    if positions is None:
        return matrices
    return matrices * _same_document(positions, block, filters.shape[1])


def _same_document(positions: Tensor, block: int, window: int) -> Tensor:
    """[B, 1, N, C, K]: whether a block's i-th output and k-th input are of one document."""
    reach = blocks_of(positions[:, :, None, None], block)  # [B, 1, N, C, 1]
    output, key = torch.arange(block)[:, None], torch.arange(block + window - 1)
    return output + window - 1 - key <= reach


def _time_second(outputs: Tensor, time: int) -> Tensor:
    """[B, H, N, C, D] to [B, T, H, D], without a copy if T = N·C."""
    outputs = outputs.flatten(2, 3)
    if outputs.shape[2] != time:
        outputs = outputs[:, :, :time].contiguous()
    return outputs.transpose(1, 2)
