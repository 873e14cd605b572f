"""A pattern of attention of one's own, `model.attention: forgetting`.

    l_ij + Σ_{j<m≤i} ln f_m,   f_m = σ(w_h · v_m + b_h)

for the logit l_ij of query i and key j of head h: each token m that a query sees makes it forget
what came before m, as in the forgetting transformer (Lin et al., 2025), whose gates read hidden
states. A pattern's module has none; here they read all heads' values v_m of a token. What is added
depends on data, not on positions alone, so that it is no transform of scores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.model.attention import Pattern, register
from cat_lm.model.attention.modules.call import AttentionCall, visible_keys
from cat_lm.model.rules import head_width, key_heads


class Forgetting(Pattern):
    """What there is to know before a model is made."""

    name = "forgetting"
    title = words = "forgetting attention"
    implementations = ("sdpa",)
    takes_transforms = False  # it does not call `call.attend`, which would do them
    options = {"start": 4.0}  # noqa: RUF012

    def problems(self, model: Any, options: dict[str, Any]) -> list[str]:
        start = options["start"]
        is_number = isinstance(start, int | float) and not isinstance(start, bool)
        return [] if is_number else [f"attention_options.start={start!r}: must be a number"]

    def build(self, config: Any) -> nn.Module:
        start = self.resolved(config.attention_options)["start"]
        width = key_heads(config) * head_width(config)
        return ForgettingCore(width, config.num_attention_heads, float(start))


class ForgettingCore(nn.Module):
    """One layer. Where b starts from 4, each token makes the earlier ones weigh 2% less."""

    def __init__(self, width: int, heads: int, start: float) -> None:
        super().__init__()
        self.start, self.gate = start, nn.Linear(width, heads)

    def initial_values(self) -> dict[str, Tensor]:
        """Start from the same gate everywhere; the linear layer alone would start as any other."""
        weight, bias = self.gate.weight, self.gate.bias
        return {
            "gate.weight": torch.zeros_like(weight),
            "gate.bias": torch.full_like(bias, self.start),
        }

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, extra: Tensor | None, call: AttentionCall
    ) -> tuple[Tensor, None]:
        """Attend: query [B, H, T, D], key and value [B, H or fewer, S, D] to [B, T, H, D].

        With a cache S counts its tokens too, and T the new ones alone.
        """
        visible = visible_keys(call.mask, query, key)  # [B, 1, T, S]; None: all
        gates = F.logsigmoid(self.gate(value.transpose(1, 2).flatten(2)).float())
        seen = gates.mT[:, :, None]  # [B, H, 1, S]
        if visible is not None:  # what a query does not see, padding too, makes it forget nothing
            seen = seen.masked_fill(~visible, 0.0)
        added = seen.flip(-1).cumsum(-1).flip(-1) - seen  # over m > j
        if visible is not None:
            added = added.masked_fill(~visible, torch.finfo(query.dtype).min)
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        output = F.scaled_dot_product_attention(
            *(query, key, value, added.to(query.dtype)), dropout_p=call.dropout, scale=call.scaling
        )
        return output.transpose(1, 2).contiguous(), None


register(Forgetting())
