"""Linear attention: φ = elu + 1, normalised. The paper does not state its φ; this is Zoology's."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from cat_lm.mixers.kinds import lincat
from cat_lm.mixers.parts.base import ALL, MixerKind, Setting
from cat_lm.mixers.parts.options import check_counts


@dataclass(frozen=True)
class Options:
    """Options of linear attention.

    Attributes:
        heads: H.
        bias: of the projections.
    """

    heads: int = 1
    bias: bool = True

    def __post_init__(self) -> None:
        check_counts(self, "heads")

    @property
    def plain(self) -> lincat.Options:
        """The same layer as LinCAT without filters."""
        return lincat.Options(streams=None, heads=self.heads, bias=self.bias)


class LinearAttention(MixerKind):
    """LinCAT without filters."""

    name = "linear-attention"
    Options = Options
    supports = ALL

    def check(self, options: Options, setting: Setting) -> None:
        lincat.ENTRY.check(options.plain, setting)

    def build(self, options: Options, setting: Setting) -> nn.Module:
        return lincat.ENTRY.build(options.plain, setting)


ENTRY = LinearAttention()
