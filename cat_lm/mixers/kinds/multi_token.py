"""Multi-token attention, exactly, for rows of at most 512 tokens (Golovneva et al., 2025).

Scores are convolved over queries and keys, and maps mixed over heads, by the equations of
`cat_lm.ops.convolution.multi_token`. The rest is `attention`'s layer, without positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cat_lm.mixers.base import ALL, MixerKind, Setting
from cat_lm.mixers.shared import attention_flops, check_counts
from cat_lm.ops.convolution.multi_token_options import (
    DEFAULTS,
    LONGEST,
    mixings,
    option_problems,
    parameters,
)

if TYPE_CHECKING:
    from torch import nn


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
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}: must be at least 0 and below 1")
        if problems := option_problems(**self.kernel):
            raise ValueError(problems[0])

    @property
    def kernel(self) -> dict[str, Any]:
        """The options of the kernel and of what mixes heads."""
        return {name: getattr(self, name) for name in DEFAULTS}


class MultiToken(MixerKind):
    """Softmax attention whose scores are convolved."""

    name = "multi-token"
    Options = Options
    layers = 1
    longest = LONGEST
    supports = ALL

    def check(self, options: Options, setting: Setting) -> None:
        if setting.d_model % options.heads:
            raise ValueError(f"heads={options.heads} do not divide d_model={setting.d_model}")

    def build(self, options: Options, setting: Setting) -> nn.Module:
        from cat_lm.mixers.modules.multi_token import MultiTokenAttention

        return MultiTokenAttention(options, setting)

    def mixing_flops(self, options: Options, setting: Setting, length: int) -> float:
        taps = parameters(options.heads, **options.kernel)
        return attention_flops(length, setting.d_model) + 6 * length * taps

    def saved_tensors(self, options: Options, setting: Setting) -> float:
        return 5.0

    def saved_maps(self, options: Options, setting: Setting) -> float:
        # In fp32 alone: scores before the kernel, what is mixed over heads, what drops some.
        halves = 1 + len(mixings(options.head_mixing)) + bool(options.dropout)
        return options.heads * (1.2 + halves / 2)

    def state_numbers(self, options: Options, setting: Setting, length: int) -> int:
        return setting.d_model * (2 * length + options.query_window - 1)


ENTRY = MultiToken()
