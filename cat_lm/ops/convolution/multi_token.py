"""Multi-token attention: scores convolved over queries and keys, maps mixed over heads.

Golovneva, Wang, Weston and Sukhbaatar, "Multi-Token Attention" (2025), sections 3.1 to 3.3. With M₀
the zeros above the diagonal and S_h = M₀(Q_h K_hᵀ · scale),

    Z_h[i,j] = sum over a < c_q, |b| <= (c_k − 1) / 2 of θ_h[a,b] S_h[i−a, j+b]
    Z ← W_before Z over heads;   A = softmax(Z + causal mask);   A ← W_after M₀(A) over heads

which is causal, as S is zero for keys after their query. Z and A are maps of T × T that are kept
whole: this is the reference for short rows, of which a kernel of rank R (`conv_rank`) is the cheap
form. The convolution of A after the softmax that the paper tries too, and the group norm and gate
that its code puts after attention, are not here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.ops.convolution.maps import close_gaps, reopen_gaps
from cat_lm.ops.convolution.multi_token_options import mixings
from cat_lm.ops.runtime.fake import is_fake

_BLOCK = 32  # columns whose products are computed together for a kernel's gradient


def identity_start(
    heads: int, query_window: int, key_window: int, head_mixing: str
) -> dict[str, Tensor]:
    """Build the identity parameters by name.

    `kernel` is θ [H, c_q, c_k], 1 at the query and key themselves; `before` and `after`, of which
    `head_mixing` names none, one or both, are W [H, H].
    """
    kernel = torch.zeros(heads, query_window, key_window)
    kernel[:, 0, key_window // 2] = 1.0
    return {"kernel": kernel} | {name: torch.eye(heads) for name in mixings(head_mixing)}


def multi_token_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Tensor,
    before: Tensor | None,
    after: Tensor | None,
    *,
    visible: Tensor,
    positions: Tensor,
    scaling: float,
    dropout: float = 0.0,
    place: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend.

    Args:
        query: [B, H, P + T, D]: T queries after P earlier ones, zeros where there are none.
        key, value: [B, H, S, D].
        kernel: θ [H, c_q, c_k], c_k odd; [·, a, (c_k − 1) / 2 + b] for θ[a,b].
        before, after: [H, H], what an output head reads of each; None for no mixing.
        visible: [B or 1, 1, P + T, S] bool, the keys that each query may see.
        positions: [B or 1, T] of the T queries in their documents: none reads one of another.
        place: [B, S] as `places_of_real_keys` gives it, where padding may stand between keys.

    Returns:
        [B, T, H, D], and the maps [B, H, T, S] after all mixing.
    """
    time = positions.shape[1]
    scores = (query @ key.mT * scaling).masked_fill(~visible, 0.0)
    if place is not None:
        scores = close_gaps(scores, place)
    scores = _convolve_scores(scores, kernel.to(scores.dtype), positions)
    if place is not None:
        scores = reopen_gaps(scores, place)
    visible = visible[:, :, -time:]
    scores = _over_heads(scores, before)
    # Not -inf: a query of a padding token may see nothing, and must not become NaN.
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    maps = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    maps = _over_heads(maps.to(query.dtype).masked_fill(~visible, 0.0), after)
    maps = F.dropout(maps, dropout, training=dropout > 0)
    return (maps @ value).transpose(1, 2), maps


def _convolve_scores(scores: Tensor, kernel: Tensor, positions: Tensor) -> Tensor:
    """Return the convolved scores Z [B, H, T, S] of scores S [B, H, P + T, S].

    Rows of zeros stand before each document, so that none of its queries reads one of another.
    """
    gap = kernel.shape[1] - 1
    rows, time = scores.shape[2], positions.shape[1]
    starts = F.pad(positions == 0, (rows - time, 0))  # Earlier queries belong to the same document.
    starts[:, 0] = True
    place = torch.arange(rows, device=starts.device) + gap * starts.cumsum(dim=1)
    place = place.expand(scores.shape[0], rows)
    row = torch.arange(scores.shape[0], device=starts.device)[:, None]
    # Of one new query two documents at most start; more rows would wait for a GPU to be counted.
    count = rows + 2 * gap
    if time > 1:
        count = rows + gap if is_fake(place) else int(place.max()) + 1
    laid = scores.new_zeros(scores.shape[0], count, *scores.shape[1::2])
    laid = laid.index_put((row, place), scores.transpose(1, 2))  # [B, R, H, S]
    found = _Convolution.apply(laid.transpose(1, 2), kernel)
    return found.transpose(1, 2)[row, place[:, -time:] - gap].transpose(1, 2)


class _Convolution(torch.autograd.Function):
    """Maps [B, H, R, S] by kernels [H, c_q, c_k]: [B, H, R − c_q + 1, S].

    torch's own gradient of a kernel for each head takes longer on a CPU, in fp32.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(maps: Tensor, kernel: Tensor) -> Tensor:
        # conv2d correlates: tap b meets the key j + b, and the last of a window its own query.
        return _correlate(maps, kernel.flip(1))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        maps, kernel = ctx.saved_tensors
        gap = kernel.shape[1] - 1
        grad_maps = _correlate(F.pad(grad, (0, 0, gap, gap)), kernel.flip(2))
        return grad_maps, _kernel_gradient(maps, grad, kernel)


def _correlate(maps: Tensor, kernel: Tensor) -> Tensor:
    half = kernel.shape[2] // 2
    # Pad here, because oneDNN's padding is slow in fp32.
    maps = F.pad(maps, (half, half)).contiguous()
    return F.conv2d(maps, kernel[:, None], groups=kernel.shape[0])


def _kernel_gradient(maps: Tensor, grad: Tensor, kernel: Tensor) -> Tensor:
    """Return Σ_{b,i,j} grad[i, j] maps[i + c_q − 1 − a, j + b], [H, c_q, c_k].

    Of columns in blocks all products are made, whose diagonals are the sums.
    """
    lags, width = kernel.shape[1:]
    half, rows, spare = width // 2, grad.shape[2], -grad.shape[3] % _BLOCK
    maps = F.pad(maps, (half, half + spare)).transpose(0, 1)
    maps = maps.unfold(3, _BLOCK + width - 1, _BLOCK)  # [H, B, R, S / 32, 31 + c_k]
    grad = F.pad(grad, (0, spare)).transpose(0, 1).reshape(len(kernel), -1, _BLOCK)
    found = []
    for lag in range(lags):
        read = maps[:, :, lags - 1 - lag :][:, :, :rows].flatten(1, 3)
        products = grad.mT @ read
        found.append([products.diagonal(b, 1, 2).sum(-1) for b in range(width)])
    return torch.stack([torch.stack(taps, dim=-1) for taps in found], dim=1)


def _over_heads(maps: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return maps
    return torch.einsum("gh,bhts->bgts", weights.to(maps.dtype), maps)
