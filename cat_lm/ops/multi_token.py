"""Multi-token attention: scores convolved over queries and keys, maps mixed over heads.

Golovneva, Wang, Weston and Sukhbaatar, "Multi-Token Attention" (2025), sections 3.1 to 3.3. With M₀
the zeros above the diagonal and S_h = M₀(Q_h K_hᵀ · scale),

    Z_h[i,j] = sum over a < c_q, |b| <= (c_k − 1) / 2 of θ_h[a,b] S_h[i−a, j+b]
    Z ← W_before Z over heads;   A = softmax(Z + causal mask);   A ← W_after M₀(A) over heads

which is causal, as S is zero for keys after their query. Z and A are maps of T × T that are kept
whole: this is the reference for short rows, of which a kernel of rank R (`conv_rank`) is the cheap
form. The group norm and gate that the paper's code puts after attention are not here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.ops.convolution.maps import closed_up, opened
from cat_lm.ops.multi_token_options import mixings


def identity_start(
    heads: int, query_window: int, key_window: int, head_mixing: str
) -> dict[str, Tensor]:
    """Make parameters that change nothing, by name.

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
        scores = closed_up(scores, place)
    scores = _convolved(scores, kernel.to(scores.dtype), positions)
    if place is not None:
        scores = opened(scores, place)
    visible = visible[:, :, -time:]
    scores = _over_heads(scores, before)
    # Not -inf: a query of a padding token may see nothing, and must not become NaN.
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    maps = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    maps = _over_heads(maps.to(query.dtype).masked_fill(~visible, 0.0), after)
    maps = F.dropout(maps, dropout, training=dropout > 0)
    return (maps @ value).transpose(1, 2), maps


def _convolved(scores: Tensor, kernel: Tensor, positions: Tensor) -> Tensor:
    """Z [B, H, T, S] of scores S [B, H, P + T, S]."""
    time, rows = positions.shape[1], scores.shape[2]
    heads, lags, width = kernel.shape
    total = torch.zeros_like(scores[:, :, -time:])
    for lag in range(min(lags, rows)):
        shifted = scores[:, :, max(0, rows - time - lag) : rows - lag]
        shifted = F.pad(shifted, (0, 0, time - shifted.shape[2], 0))
        # No query reads one before its document.
        shifted = shifted.masked_fill((positions < lag)[:, None, :, None], 0.0)
        taps = kernel[:, lag, None, None, :]  # conv2d correlates: tap b meets the key j + b
        total = total + F.conv2d(shifted, taps, padding=(0, width // 2), groups=heads)
    return total


def _over_heads(maps: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return maps
    return torch.einsum("gh,bhts->bgts", weights.to(maps.dtype), maps)
