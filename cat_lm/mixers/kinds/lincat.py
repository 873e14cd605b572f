"""LinCAT: linear attention over convolved queries, keys and values, with φ = elu + 1."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.mixers.parts.base import ALL, MixerKind, Setting
from cat_lm.mixers.parts.linear import linear_attention
from cat_lm.mixers.parts.options import ConvolutionOptions, stream_settings
from cat_lm.mixers.parts.streams import Streams
from cat_lm.model.context import Context


class LinearConvolutionAugmentedAttention(nn.Module):
    """One LinCAT layer; without filters, plain linear attention."""

    def __init__(self, options: Options, width: int) -> None:
        super().__init__()
        self.streams = Streams(options, stream_settings(options, width), options.bias)
        self.out_proj = nn.Linear(width, width, bias=options.bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Mix x [B, T, C]."""
        q, k, v = self.streams(x, context)
        return self.out_proj(linear_attention(F.elu(q) + 1, F.elu(k) + 1, v, context).flatten(2))


@dataclass(frozen=True)
class Options(ConvolutionOptions):
    """Options of LinCAT.

    Attributes:
        bias: of the projections.
    """

    bias: bool = True


class ConvolvedLinearAttention(MixerKind):
    """Linear attention over convolved streams."""

    name = "lincat"
    Options = Options
    layers = 1
    supports = ALL

    def check(self, options: Options, setting: Setting) -> None:
        if setting.d_model % options.heads:
            raise ValueError(f"heads={options.heads} do not divide d_model={setting.d_model}")

    def build(self, options: Options, setting: Setting) -> nn.Module:
        return LinearConvolutionAugmentedAttention(options, setting.d_model)


ENTRY = ConvolvedLinearAttention()
