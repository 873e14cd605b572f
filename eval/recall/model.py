"""Zoology's language model around a mixer: embeddings, blocks, tied output.

    h = Dropout(embeddings);  layer i:  r = r + h,  r = r + mixer(LN₁ r),  h = LN₂ r;  LN_f(r + h)

with no state mixer (Identity; a language model has h = MLP(LN₂ r) there, GELU and four times as
wide), learned positions only where the mixer asks for them, and its initialisation: N(0, 0.02) for
every Linear and Embedding with zero biases, N(0, 0.02/√(2·layers)) for
`out_proj`; everything else keeps its own. Mamba's block has RMSNorm and no LN₂:

    r = r + h,  h = mixer(RMS r);  LN_f(r + h)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from cat_lm.mixers import Mixer, Setting

SPREAD = 0.02
EMBEDDING_DROPOUT = 0.1


class Block(nn.Module):
    """LN₁, a mixer, LN₂ on a residual stream."""

    def __init__(self, mixer: nn.Module, d_model: int, feed_forward: bool) -> None:
        super().__init__()
        self.mixer = mixer
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        wide = (nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))
        self.state_mixer = nn.Sequential(*wide) if feed_forward else nn.Identity()

    def forward(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        residual = hidden if residual is None else residual + hidden
        residual = residual + self.mixer(self.norm1(residual))
        return self.state_mixer(self.norm2(residual)), residual


class RmsBlock(nn.Module):
    """RMSNorm and a mixer on a residual stream."""

    def __init__(self, mixer: nn.Module, d_model: int, feed_forward: bool) -> None:
        super().__init__()
        if feed_forward:
            raise ValueError("Mamba's block has no feed-forward network beside it")
        self.mixer = mixer
        self.norm = nn.RMSNorm(d_model, eps=1e-5)

    def forward(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        residual = hidden if residual is None else residual + hidden
        return self.mixer(self.norm(residual)), residual


class RecallModel(nn.Module):
    """Token ids [B, T] to logits at chosen positions.

    Args:
        layers: number of blocks; none: the mixer's own.
        positions: rows of the position table, where the mixer has one: the longest T.
        feed_forward: whether blocks have a feed-forward network, as language models have.
    """

    def __init__(
        self,
        mixer: Mixer,
        *,
        vocabulary: int,
        d_model: int,
        positions: int,
        layers: int | None,
        feed_forward: bool = False,
    ) -> None:
        super().__init__()
        layers = layers or mixer.layers
        self.embedding = nn.Embedding(vocabulary, d_model)
        self.positions = nn.Embedding(positions, d_model) if mixer.learned_positions else None
        self.dropout = nn.Dropout(EMBEDDING_DROPOUT)
        block = {"layer": Block, "rms": RmsBlock}[mixer.block]
        self.blocks = nn.ModuleList(
            block(mixer.build(Setting(d_model, i, layers)), d_model, feed_forward)
            for i in range(layers)
        )
        self.norm = nn.LayerNorm(d_model)
        initialise(self, layers)

    def forward(self, tokens: Tensor, scored: Tensor) -> Tensor:
        """Logits [N, vocabulary] at N positions, row after row.

        Args:
            tokens: [B, T].
            scored: [B, T] bool, true at these positions; or the positions [B, n], where every row
                has n. Those are known before: a GPU need not be waited for, and models can stack.
        """
        hidden = self.embedding(tokens)
        if self.positions is not None:
            hidden = hidden + self.positions.weight[: tokens.shape[1]]
        hidden, residual = self.dropout(hidden), None
        for block in self.blocks:
            hidden, residual = block(hidden, residual)
        return self.norm(_chosen(residual + hidden, scored)) @ self.embedding.weight.T


def _chosen(hidden: Tensor, scored: Tensor) -> Tensor:
    """[N, C] of hidden [B, T, C]."""
    if scored.dtype == torch.bool:
        return hidden[scored]
    index = scored[..., None].expand(-1, -1, hidden.shape[-1])
    return hidden.gather(1, index).flatten(0, 1)


def initialise(model: nn.Module, layers: int) -> None:
    """The initialisation above."""
    kept = [n for n, m in model.named_modules() if getattr(m, "keeps_initialisation", False)]
    for name, module in model.named_modules():
        if any(name.startswith(f"{prefix}.") for prefix in kept):
            continue
        if isinstance(module, nn.Linear | nn.Embedding):
            spread = SPREAD / math.sqrt(2 * layers) if name.endswith("out_proj") else SPREAD
            nn.init.normal_(module.weight, std=spread)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)


def parameters(model: nn.Module) -> int:
    """Number of trained parameters."""
    return sum(p.numel() for p in model.parameters())


def learned_filters(model: nn.Module) -> list[dict[str, list[list[float]]]]:
    """For each layer with filters, stream -> [H][W], lag 0 first."""
    found = []
    for block in getattr(model, "blocks", []):
        streams = getattr(block.mixer, "streams", None)
        if streams is not None and len(streams.filters):
            with torch.no_grad():
                found.append({s: f.tolist() for s, f in streams.filters.items()})
    return found
