"""Softmax attention with learned, rotary or no positions: Zoology's layer, one head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cat_lm.mixers.base import ALL, MixerKind, Setting
from cat_lm.mixers.shared import attention_flops, attention_maps, check_counts

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Options:
    """Options of attention.

    Attributes:
        position: learned (a table added to the embeddings), rope or none.
        heads: H.
        bias: of the projections.
        dropout: of the attention map.
    """

    position: str = "learned"
    heads: int = 1
    bias: bool = True
    dropout: float = 0.1

    def __post_init__(self) -> None:
        check_counts(self, "heads")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}: must be at least 0 and below 1")
        if self.position not in ("learned", "rope", "none"):
            raise ValueError(f"position={self.position!r}: must be learned, rope or none")


class Attention(MixerKind):
    """Softmax attention."""

    name = "attention"
    Options = Options
    supports = ALL

    def learned_positions(self, options: Options) -> bool:
        return options.position == "learned"

    def check(self, options: Options, setting: Setting) -> None:
        pairs = 2 if options.position == "rope" else 1
        if setting.d_model % (pairs * options.heads):
            even = "into an even number of channels each" if pairs == 2 else "evenly"
            raise ValueError(f"heads={options.heads}: must divide d_model={setting.d_model} {even}")

    def build(self, options: Options, setting: Setting) -> nn.Module:
        from cat_lm.mixers.modules.attention import SoftmaxAttention

        return SoftmaxAttention(options, setting)

    def mixing_flops(self, options: Options, setting: Setting, length: int) -> float:
        return attention_flops(length, setting.d_model)

    def saved_tensors(self, options: Options, setting: Setting) -> float:
        return 7.0 if options.dropout or options.position == "rope" else 5.0

    def saved_maps(self, options: Options, setting: Setting) -> float:
        return attention_maps(options.heads, options.dropout)

    def saved_masks(self, options: Options, setting: Setting) -> float:
        return 0.0 if options.dropout else 1.0

    def state_numbers(self, options: Options, setting: Setting, length: int) -> int:
        return 2 * setting.d_model * length


ENTRY = Attention()
