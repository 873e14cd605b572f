"""Softmax attention over all earlier keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cat_lm.model.attention.base import Pattern
from cat_lm.model.rules import attention_channels

if TYPE_CHECKING:
    from torch import nn


class Softmax(Pattern):
    """softmax(Q Kᵀ / (t sqrt(D))) V."""

    name = "softmax"
    title = "softmax attention"
    takes_ranks = True

    def flops(self, model: Any, context_length: int) -> float:
        """Count 12·T·C over the full square (Chowdhery et al., 2022, appendix B).

        Half of it is the scores', of queries and keys that `conv_rank` makes R times as wide.
        """
        rank = getattr(model, "conv_rank", 1)
        return 6 * (1 + rank) * context_length * attention_channels(model)

    def division_problems(self, model: Any) -> list[str]:
        """Return no problem: no head knows of another."""
        return []

    def build(self, config: Any) -> nn.Module:
        """Make the module, which has no parameters."""
        from cat_lm.model.attention.modules.call import SoftmaxCore

        return SoftmaxCore()


ENTRY = Softmax()
