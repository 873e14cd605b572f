"""Linear attention: φ = elu + 1, normalised. The paper does not state its φ; this is Zoology's."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from cat_lm.mixers.kinds import lincat
from cat_lm.mixers.parts.base import ALL, MixerKind, Setting
from cat_lm.mixers.parts.options import ConvolutionOptions, check_counts


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


class LinearAttention(MixerKind):
    """LinCAT without filters."""

    name = "linear-attention"
    Options = Options
    supports = ALL

    def check(self, options: Options, setting: Setting) -> None:
        lincat.ENTRY.check(options, setting)

    def build(self, options: Options, setting: Setting) -> nn.Module:
        plain = ConvolutionOptions(streams=None, heads=options.heads, bias=options.bias)
        return lincat.ENTRY.build(plain, setting)


ENTRY = LinearAttention()
