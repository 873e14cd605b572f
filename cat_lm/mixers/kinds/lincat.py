"""LinCAT: linear attention over convolved queries, keys and values, with φ = elu + 1."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.mixers.parts.base import ALL, MixerKind, Setting
from cat_lm.mixers.parts.linear import linear_attention
from cat_lm.mixers.parts.options import ConvolutionOptions, stream_settings
from cat_lm.mixers.parts.streams import Streams
from cat_lm.model.context import Context


class LinearConvolutionAugmentedAttention(nn.Module):
    """One LinCAT layer; without filters, plain linear attention."""

    def __init__(self, options: ConvolutionOptions, width: int) -> None:
        super().__init__()
        self.streams = Streams(options, stream_settings(options, width))
        self.out_proj = nn.Linear(width, width, bias=options.bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Mix x [B, T, C]."""
        q, k, v = self.streams(x, context)
        return self.out_proj(linear_attention(F.elu(q) + 1, F.elu(k) + 1, v, context).flatten(2))


class ConvolvedLinearAttention(MixerKind):
    """Linear attention over convolved streams."""

    name = "lincat"
    Options = ConvolutionOptions
    layers = 1
    supports = ALL

    def check(self, options: ConvolutionOptions, setting: Setting) -> None:
        if setting.d_model % options.heads:
            raise ValueError(f"heads={options.heads} do not divide d_model={setting.d_model}")

    def build(self, options: ConvolutionOptions, setting: Setting) -> nn.Module:
        return LinearConvolutionAugmentedAttention(options, setting.d_model)


ENTRY = ConvolvedLinearAttention()
