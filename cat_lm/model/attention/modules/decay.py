"""The module of `score_transform: exponential_decay`: rates, and logits' factors.

e^{−α (i − j)} = e^{−α (i − p)} · e^{α (j − p)} for every p: queries and keys that are scaled so
have the decayed logits, in any attention function.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cat_lm.model.attention.modules.scores import ScoreModule
from cat_lm.ops.decay_rates import REACH, REACH_HALF, largest_rate


class DecayScores(ScoreModule):
    """Multiplies logits by e^{−α_c (i − j)}, or where both sides are read by e^{−α_c |i − j|}.

    Rates are computed where they are used: a buffer would be rounded with the weights, and what
    is lost of a rate grows with the distance.

    Args:
        heads: H.
        spacing, bound: as `ExponentialDecay` has them.
        is_two_sided: whether queries read later keys, as in an encoder; no factors of a query and a
            key say that decay.
    """

    def __init__(self, heads: int, spacing: str, bound: float, is_two_sided: bool = False):
        super().__init__()
        self.heads, self.is_two_sided = heads, is_two_sided
        self.largest = largest_rate(spacing, bound)
        # 1 − e^{−α} of the last head; the others' lie evenly below.
        self.gap = -math.expm1(-bound) if spacing == "slow" else 1 - bound

    def rates(self, head: Tensor, dtype: torch.dtype) -> Tensor:
        """Return α of heads by their numbers."""
        return -torch.log1p(head.to(dtype) * (-self.gap / (self.heads - 1)))

    def separates(self, queries: int, dtype: torch.dtype, implementation: str) -> bool:
        """Return where factors serve: not in eager, nor for one query, whose logits are few.

        Raises:
            ValueError: flash attention, which has nothing else, for too many queries.
        """
        reach = REACH_HALF if dtype == torch.float16 else REACH
        has_factors = not self.is_two_sided and self.largest * (queries - 1) <= reach
        if "flash" not in implementation:
            return has_factors and implementation != "eager" and queries > 1
        if not has_factors:
            raise ValueError(
                f"attn_implementation={implementation}: logits decay by more than e^-{reach:.0f} "
                f"over {queries} tokens of {str(dtype).removeprefix('torch.')}, or to both sides; "
                "use sdpa"
            )
        return True

    def score(
        self, logits: Tensor, query_position: Tensor, key_position: Tensor, head: Tensor
    ) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        distance = query_position - key_position
        # Keys that come later are masked, unless both sides are read, and must stay numbers.
        distance = (distance.abs() if self.is_two_sided else distance.clamp(min=0)).to(dtype)
        return logits * torch.exp(-self.rates(head, dtype) * distance)

    def separated(
        self, query_positions: Tensor, key_positions: Tensor, head: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        rates = self.rates(head, dtype)
        first, last = query_positions.aminmax(dim=-1, keepdim=True)
        # In the middle of the queries: of earlier keys a factor may become 0, as the decay does.
        middle = (first + last).to(dtype) / 2
        # A cache of fixed length counts keys beyond the last query, which all are masked.
        key_positions = key_positions.minimum(last)
        return torch.exp(rates * (middle - query_positions)), torch.exp(
            rates * (key_positions - middle)
        )
