"""CAT: softmax attention over convolved queries, keys and values (Definition 1 of the paper).

Without position embeddings by default. The rest is Zoology's attention layer: a projection with
bias, dropout 0.1 on the attention map, an output projection with bias.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from eval.recall.mixers import Setting
from eval.recall.mixers._attention import rotate, softmax_attention
from eval.recall.mixers._convolution import ConvolutionOptions, ConvolvedProjections

LAYERS = 1


@dataclass(frozen=True)
class Options(ConvolutionOptions):
    """Options of CAT.

    Attributes:
        bias: of the projections.
        dropout: of the attention map.
        position: none; learned, a table added to the embeddings; rope, after the filters.
    """

    bias: bool = True
    dropout: float = 0.1
    position: str = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}: must be at least 0 and below 1")
        if self.position not in ("none", "learned", "rope"):
            raise ValueError(f"position={self.position!r}: must be none, learned or rope")


def LEARNED_POSITIONS(options: Options) -> bool:
    return options.position == "learned"


class ConvolutionAugmentedAttention(nn.Module):
    """One CAT layer."""

    def __init__(self, options: Options, setting: Setting) -> None:
        super().__init__()
        self.streams = ConvolvedProjections(setting.d_model, options, options.bias)
        self.out_proj = nn.Linear(setting.d_model, setting.d_model, bias=options.bias)
        self.dropout, self.rotary = options.dropout, options.position == "rope"
        if self.rotary and setting.d_model % (2 * options.heads):
            raise ValueError(f"position=rope: d_model={setting.d_model} gives odd heads")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.streams(x)
        if self.rotary:
            q, k = rotate(q), rotate(k)
        y = softmax_attention(q, k, v, self.dropout if self.training else 0.0)
        return self.out_proj(y.flatten(2))


def build(options: Options, setting: Setting) -> nn.Module:
    return ConvolutionAugmentedAttention(options, setting)
