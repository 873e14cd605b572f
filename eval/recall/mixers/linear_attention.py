"""Linear attention: φ = elu + 1, normalised. The paper does not state its φ; this is Zoology's."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from eval.recall.mixers import Setting, lincat

LAYERS = 2


@dataclass(frozen=True)
class Options:
    """Options of linear attention.

    Attributes:
        heads: H.
        bias: of the projections.
    """

    heads: int = 1
    bias: bool = True


def build(options: Options, setting: Setting) -> nn.Module:
    plain = lincat.Options(streams=None, heads=options.heads, bias=options.bias)
    return lincat.LinearConvolutionAugmentedAttention(plain, setting)
