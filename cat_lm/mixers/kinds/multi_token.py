"""Multi-token attention, exactly, for rows of at most 512 tokens (Golovneva et al., 2025).

Scores are convolved over queries and keys, and maps mixed over heads, by the equations of
`cat_lm.ops.convolution.multi_token`. The rest is `attention`'s layer, without positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cat_lm.mixers.kinds import cat
from cat_lm.mixers.parts.options import check_counts, check_fraction
from cat_lm.ops.convolution.multi_token_options import (
    DEFAULTS,
    LONGEST,
    option_problems,
)


@dataclass(frozen=True)
class Options:
    """Options of multi-token attention.

    Attributes:
        heads: H.
        bias: of the projections.
        dropout: of the attention map.
        query_window, key_window: c_q and c_k, the second one odd.
        head_mixing: where maps are mixed over heads: none, before the softmax, after it, both.
    """

    heads: int = 1
    bias: bool = True
    dropout: float = 0.1
    query_window: int = DEFAULTS["query_window"]
    key_window: int = DEFAULTS["key_window"]
    head_mixing: str = DEFAULTS["head_mixing"]

    def __post_init__(self) -> None:
        check_counts(self, "heads")
        check_fraction(self, "dropout")
        if problems := option_problems(**self.kernel):
            raise ValueError(problems[0])

    @property
    def plain(self) -> cat.Options:
        """The layer around the scores, CAT's without filters."""
        return cat.Options(streams=None, heads=self.heads, bias=self.bias, dropout=self.dropout)

    @property
    def kernel(self) -> dict[str, Any]:
        """The options of the kernel and of what mixes heads."""
        return {name: getattr(self, name) for name in DEFAULTS}


class MultiToken(cat.ConvolvedAttention):
    """Softmax attention whose scores are convolved."""

    name = "multi-token"
    Options = Options
    longest = LONGEST

    def attention_settings(self, options: Options) -> dict[str, Any]:
        chosen = {"attention": "multi_token", "attention_options": options.kernel}
        return super().attention_settings(options) | chosen | {"_attn_implementation": "eager"}


ENTRY = MultiToken()
