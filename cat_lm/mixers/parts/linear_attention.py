"""Linear attention over [B, T, H, F] features."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.model.context import Context
from cat_lm.ops.recurrence.decaying_scan import decaying_scan
from cat_lm.ops.runtime.documents import document_runs
from cat_lm.ops.runtime.precision import without_autocast


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: Context,
    eps: float = 1e-12,
) -> Tensor:
    """Compute o_t = Σ_{s≤t} (q_t·k_s) v_s / Σ_{s≤t} q_t·k_s for feature maps q, k [B, T, H, F].

    Exact, for any feature map with positive products; sums are in fp32 at least. Quadratic in T;
    with a state, which holds both sums, linear.
    """
    k, document_ids = context.without_padding(k), context.documents
    widest = torch.promote_types(q.dtype, torch.float32)
    if context.state is not None:
        return _from_state(q.to(widest), k.to(widest), v, eps, context)
    with without_autocast(q):
        scores = torch.einsum("bthf,bshf->bhts", q.to(widest), k.to(widest)).tril()
        if document_ids is not None:
            runs = document_runs(document_ids)
            scores = scores * (runs[:, :, None] == runs[:, None])[:, None]
        y = torch.einsum("bhts,bshd->bthd", scores, v.to(widest))
    return (y / (scores.sum(dim=-1).transpose(1, 2)[..., None] + eps)).to(v.dtype)


def _from_state(q: Tensor, k: Tensor, v: Tensor, eps: float, context: Context) -> Tensor:
    """Go on from the sums before; one more value of 1 makes the lower sum."""
    values = F.pad(v.to(q.dtype), (0, 1), value=1.0)
    never = q.new_zeros(*q.shape[:3], 1, 1)
    one = q.new_ones(1, 1, 1)
    sums = context.recur(decaying_scan, q, k, values, never, one)
    return (sums[..., :-1] / (sums[..., -1:] + eps)).to(v.dtype)
