"""Gated linear attention's layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.mixers.modules.context import State, at_least_fp32, from_state, without_padding
from cat_lm.ops.recurrence import GLA_LOW_RANK, fla
from cat_lm.ops.recurrence.decaying_scan import decaying_scan

if TYPE_CHECKING:
    from cat_lm.mixers.base import Setting
    from cat_lm.mixers.kinds import gla

TEMPERATURE = 16


class GatedLinearAttention(nn.Module):
    """One GLA layer."""

    def __init__(self, options: gla.Options, setting: Setting) -> None:
        super().__init__()
        width, self.heads = setting.d_model, options.heads
        of_package = options.operator == "fla"
        self.operator = fla.gated_linear_attention if of_package else gated_linear_attention
        keys, values = options.sizes(width)
        self.q_proj = nn.Linear(width, keys, bias=False)
        self.k_proj = nn.Linear(width, keys, bias=False)
        self.v_proj = nn.Linear(width, values, bias=False)
        self.g_proj = nn.Linear(width, values, bias=False)
        self.decay_proj = nn.Sequential(
            nn.Linear(width, GLA_LOW_RANK, bias=False), nn.Linear(GLA_LOW_RANK, keys)
        )
        self.norm = nn.RMSNorm(values // options.heads, eps=1e-5)
        self.o_proj = nn.Linear(values, width, bias=False)

    def forward(
        self,
        x: Tensor,
        *,
        document_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        state: State | None = None,
    ) -> Tensor:
        streams = (self.q_proj(x), self.k_proj(x), self.v_proj(x), self.decay_proj(x))
        y = decayed_attention(
            *(s.unflatten(-1, (self.heads, -1)) for s in streams),
            operator=self.operator,
            document_ids=document_ids,
            padding_mask=padding_mask,
            state=state,
        )
        return self.o_proj(self.norm(y).flatten(2) * F.silu(self.g_proj(x)))


def decayed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    *,
    operator: Callable[..., Any],
    document_ids: Tensor | None,
    padding_mask: Tensor | None,
    state: State | None,
) -> Tensor:
    """Compute o [B, T, H, V] with the decays sigmoid(gates)^{1/16}.

    Args:
        q, k, gates: [B, T, H, K].
        v: [B, T, H, V].
        operator: computes `gated_linear_attention`.
    """
    decay = F.logsigmoid(at_least_fp32(gates)) / TEMPERATURE
    # Without a key and a decay a step leaves the state as it was.
    k, decay = (without_padding(s, padding_mask) for s in (k, decay))
    return from_state(operator, q, k, v, decay, document_ids=document_ids, state=state)


def gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, **how: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute o [B, T, H, V] for q, k, log α [B, T, H, K] and v [B, T, H, V].

    Args:
        how: document_ids, initial_state, return_state and backend, as of `decaying_scan`.
    """
    one = log_decay.new_ones(1, 1, 1)
    return decaying_scan(q * q.shape[-1] ** -0.5, k, v, log_decay[..., None], one, **how)
