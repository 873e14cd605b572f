"""The modules of LaS attention: logits that decay with distance, and a box filter of the values."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from cat_lm.model.attention.modules.chunk import chunk_numbers
from cat_lm.model.attention.modules.scores import ScoreModule
from cat_lm.model.context import Context
from cat_lm.ops import head_conv
from cat_lm.ops.convolution.api import centred_conv
from cat_lm.ops.decay_rates import REACH, REACH_HALF, largest_rate


class DecayScores(ScoreModule):
    """Multiplies logits by e^{−α_c (i − j)}, or in two-sided attention by e^{−α_c |i − j|}.

    e^{−α (i − j)} = e^{−α (i − p)} · e^{α (j − p)} for every p: queries and keys that are scaled so
    have the decayed logits, in any attention function. Rates are computed where they are used, as a
    buffer would be rounded with the weights.

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
        # This is 1 − e^{−α} of the last head; the other heads are evenly spaced below it.
        self.gap = -math.expm1(-bound) if spacing == "slow" else 1 - bound

    def rates(self, head: Tensor, dtype: torch.dtype) -> Tensor:
        """Return α of heads by their indices."""
        return -torch.log1p(head.to(dtype) * (-self.gap / (self.heads - 1)))

    def separates(self, queries: int, dtype: torch.dtype, implementation: str) -> bool:
        """Return True if the decay is applied as factors: not in eager, nor for a single query."""
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
        # Causal attention masks later keys, but their decay must stay finite.
        distance = (distance.abs() if self.is_two_sided else distance.clamp(min=0)).to(dtype)
        return logits * torch.exp(-self.rates(head, dtype) * distance)

    def separated(
        self, query_positions: Tensor, key_positions: Tensor, head: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        rates = self.rates(head, dtype)
        first, last = query_positions.aminmax(dim=-1, keepdim=True)
        # Distances count from the middle of the queries: a factor of earlier keys may underflow to
        # 0, as the decay does.
        middle = (first + last).to(dtype) / 2
        # A static cache counts keys beyond the last query, which are all masked.
        key_positions = key_positions.minimum(last)
        distances = middle - query_positions, key_positions - middle
        return torch.exp(rates * distances[0]), torch.exp(rates * distances[1])


class SmoothedValues(nn.Module):
    """Averages each value with those of the P − 1 tokens before it, in one convolution.

    An encoder may have the box in the middle, over (P − 1)/2 values on either side.

    Args:
        width: P.
        run: the tokens of a chunk, beyond which no query sees and nothing is averaged; None for
            attention to all keys.
        is_centred: whether later values are read too: of whole rows, with P odd.
    """

    def __init__(self, width: int, run: int | None, is_centred: bool = False):
        super().__init__()
        if is_centred and run is not None:
            raise ValueError(f"run={run}: a centred box reads whole rows; cut them before")
        self.width, self.run, self.is_centred = width, run, is_centred

    def forward(self, value: Tensor, context: Context) -> Tensor:
        """Average values [B, T, H, D]; with chunks the context holds the tokens' positions."""
        value, documents = context.without_padding(value), context.documents
        taps = value.new_full((value.shape[2], self.width), 1 / self.width)
        how = {"backend": context.conv_backend}
        if self.is_centred:
            if documents is not None or context.state is not None:
                raise ValueError("a centred box reads later values: not with documents or a state")
            return centred_conv(value, taps, **how)
        before = context.inputs_before("value", value, self.width)
        if self.run is not None:
            where = (context.positions % self.run).expand(value.shape[:2])
            runs = chunk_numbers(where, documents)
            documents = (runs - runs[:, :1]).int()
        if self.run is None or before is None:
            return head_conv(value, taps, document_ids=documents, initial_state=before, **how)
        # Keep only those earlier values that are in the first new token's chunk.
        past = before.shape[1]
        ages = torch.arange(past, 0, -1, device=value.device)
        is_same = ages <= context.positions[:, :1] % self.run
        runs = torch.cat([(is_same.int() - 1).expand(len(value), -1), documents], dim=1)
        whole = torch.cat([before, value], dim=1)
        return head_conv(whole, taps, document_ids=runs, **how)[:, past:]
