"""LinCAT: linear attention over convolved queries, keys and values, with φ = elu + 1."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from eval.recall.mixers import Setting
from eval.recall.mixers._attention import linear_attention
from eval.recall.mixers._convolution import ConvolutionOptions, ConvolvedProjections

LAYERS = 1


@dataclass(frozen=True)
class Options(ConvolutionOptions):
    """Options of LinCAT.

    Attributes:
        bias: of the projections.
    """

    bias: bool = True


class LinearConvolutionAugmentedAttention(nn.Module):
    """One LinCAT layer; without filters, plain linear attention."""

    def __init__(self, options: Options, setting: Setting) -> None:
        super().__init__()
        self.streams = ConvolvedProjections(setting.d_model, options, options.bias)
        self.out_proj = nn.Linear(setting.d_model, setting.d_model, bias=options.bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.streams(x)
        return self.out_proj(linear_attention(F.elu(q) + 1, F.elu(k) + 1, v).flatten(2))


def build(options: Options, setting: Setting) -> nn.Module:
    return LinearConvolutionAugmentedAttention(options, setting)
