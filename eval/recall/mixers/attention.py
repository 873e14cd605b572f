"""Softmax attention with learned, rotary or no positions: Zoology's layer, one head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from eval.recall.mixers import Setting
from eval.recall.mixers._attention import rotate, softmax_attention

LAYERS = 2


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
        if self.heads < 1:
            raise ValueError(f"heads={self.heads}: must be at least 1")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}: must be at least 0 and below 1")
        if self.position not in ("learned", "rope", "none"):
            raise ValueError(f"position={self.position!r}: must be learned, rope or none")


def LEARNED_POSITIONS(options: Options) -> bool:
    return options.position == "learned"


class SoftmaxAttention(nn.Module):
    """One attention layer."""

    def __init__(self, options: Options, setting: Setting) -> None:
        super().__init__()
        pairs = 2 if options.position == "rope" else 1
        if setting.d_model % (pairs * options.heads):
            even = "into an even number of channels each" if pairs == 2 else "evenly"
            raise ValueError(f"heads={options.heads}: must divide d_model={setting.d_model} {even}")
        self.options = options
        self.projection = nn.Linear(setting.d_model, 3 * setting.d_model, bias=options.bias)
        self.out_proj = nn.Linear(setting.d_model, setting.d_model, bias=options.bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projection(x).unflatten(-1, (3, self.options.heads, -1)).unbind(dim=2)
        if self.options.position == "rope":
            q, k = rotate(q), rotate(k)
        y = softmax_attention(q, k, v, self.options.dropout if self.training else 0.0)
        return self.out_proj(y.flatten(2))


def build(options: Options, setting: Setting) -> nn.Module:
    return SoftmaxAttention(options, setting)
