"""Linear attention over [B, T, H, F] features, and LinCAT's layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.mixers.modules.context import State, without_padding
from cat_lm.mixers.modules.projections import ConvolvedProjections
from cat_lm.ops.recurrence.decaying_scan import decaying_scan
from cat_lm.ops.runtime.documents import document_runs
from cat_lm.ops.runtime.precision import without_autocast

if TYPE_CHECKING:
    from cat_lm.mixers.base import Setting
    from cat_lm.mixers.kinds import lincat


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eps: float = 1e-12,
    *,
    document_ids: Tensor | None = None,
    padding_mask: Tensor | None = None,
    state: State | None = None,
) -> Tensor:
    """Compute o_t = Σ_{s≤t} (q_t·k_s) v_s / Σ_{s≤t} q_t·k_s for feature maps q, k [B, T, H, F].

    Exact, for any feature map with positive products; sums are in fp32 at least. Quadratic in T;
    with a state, which holds both sums, linear.
    """
    k = without_padding(k, padding_mask)
    widest = torch.promote_types(q.dtype, torch.float32)
    if state is not None:
        return _from_state(q.to(widest), k.to(widest), v, eps, document_ids, state)
    with without_autocast(q):
        scores = torch.einsum("bthf,bshf->bhts", q.to(widest), k.to(widest)).tril()
        if document_ids is not None:
            runs = document_runs(document_ids)
            scores = scores * (runs[:, :, None] == runs[:, None])[:, None]
        y = torch.einsum("bhts,bshd->bthd", scores, v.to(widest))
    return (y / (scores.sum(dim=-1).transpose(1, 2)[..., None] + eps)).to(v.dtype)


def _from_state(
    q: Tensor, k: Tensor, v: Tensor, eps: float, document_ids: Tensor | None, state: State
) -> Tensor:
    """Go on from the sums before; one more value of 1 makes the lower sum."""
    values = F.pad(v.to(q.dtype), (0, 1), value=1.0)
    never = q.new_zeros(*q.shape[:3], 1, 1)
    sums, last = decaying_scan(
        *(q, k, values, never, q.new_ones(1, 1, 1)),
        document_ids=document_ids,
        initial_state=state.get("sums"),
        return_state=True,
    )
    state["sums"] = last.detach()
    return (sums[..., :-1] / (sums[..., -1:] + eps)).to(v.dtype)


class LinearConvolutionAugmentedAttention(nn.Module):
    """One LinCAT layer; without filters, plain linear attention."""

    def __init__(self, options: lincat.Options, setting: Setting) -> None:
        super().__init__()
        self.streams = ConvolvedProjections(setting.d_model, options, options.bias)
        self.out_proj = nn.Linear(setting.d_model, setting.d_model, bias=options.bias)

    def forward(
        self,
        x: Tensor,
        *,
        document_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        state: State | None = None,
    ) -> Tensor:
        how = {"document_ids": document_ids, "padding_mask": padding_mask, "state": state}
        q, k, v = self.streams(x, **how)
        return self.out_proj(linear_attention(F.elu(q) + 1, F.elu(k) + 1, v, **how).flatten(2))
