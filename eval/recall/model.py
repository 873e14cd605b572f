"""Zoology's language model around a mixer: embeddings, blocks, tied output.

    h = embeddings;  layer i:  r = r + D(h),  r = r + mixer(LN₁ r),  h = LN₂ r;  LN_f(r + h)

with D dropout of the embeddings before the first layer and nothing before the others, no state
mixer (Identity; a language model has h = MLP(LN₂ r) there, GELU and four times as wide), learned
positions only where the mixer asks for them, and its initialisation: N(0, 0.02) for every Linear
and Embedding with zero biases, N(0, 0.02/√(2·layers)) for `out_proj`; everything else keeps its
own. Mamba's block has RMSNorm, no LN₂ and no dropout:

    r = r + h,  h = mixer(RMS r);  LN_f(r + h)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from cat_lm.core.parameters import kept_parts, start
from cat_lm.mixers import Mixer, Setting
from cat_lm.mixers.modules.projections import Filters

SPREAD = 0.02


class Block(nn.Module):
    """LN₁, a mixer, LN₂ on a residual stream."""

    embedding_dropout = 0.1

    def __init__(self, mixer: nn.Module, d_model: int, feed_forward: bool) -> None:
        super().__init__()
        self.mixer = mixer
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        wide = (nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))
        self.state_mixer = nn.Sequential(*wide) if feed_forward else nn.Identity()

    def forward(
        self, hidden: Tensor, residual: Tensor | None, **how: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        residual = hidden if residual is None else residual + hidden
        residual = residual + self.mixer(self.norm1(residual), **how)
        return self.state_mixer(self.norm2(residual)), residual


class RmsBlock(nn.Module):
    """RMSNorm and a mixer on a residual stream."""

    embedding_dropout = 0.0

    def __init__(self, mixer: nn.Module, d_model: int, feed_forward: bool) -> None:
        super().__init__()
        if feed_forward:
            raise ValueError("Mamba's block has no feed-forward network beside it")
        self.mixer = mixer
        self.norm = nn.RMSNorm(d_model, eps=1e-5)

    def forward(
        self, hidden: Tensor, residual: Tensor | None, **how: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        residual = hidden if residual is None else residual + hidden
        return self.mixer(self.norm(residual), **how), residual


BLOCKS = {"layer": Block, "rms": RmsBlock}  # by the name that a mixer gives


def embedding_dropout(mixer: Mixer, chosen: float | None) -> float:
    """Return the share of the embeddings that is dropped; none chosen: the block's in Zoology."""
    return BLOCKS[mixer.block].embedding_dropout if chosen is None else chosen


class RecallModel(nn.Module):
    """Token ids [B, T] to logits at chosen positions.

    Args:
        layers: number of blocks; none: the mixer's own.
        positions: rows of the position table, where the mixer has one: the longest T.
        feed_forward: whether blocks have a feed-forward network, as language models have.
        dropout: of the embeddings; none: the block's own.
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
        dropout: float | None = None,
    ) -> None:
        super().__init__()
        layers = layers or mixer.layers
        self.embedding = nn.Embedding(vocabulary, d_model)
        self.positions = nn.Embedding(positions, d_model) if mixer.learned_positions else None
        self.dropout = nn.Dropout(embedding_dropout(mixer, dropout))
        self.blocks = nn.ModuleList(
            BLOCKS[mixer.block](mixer.build(Setting(d_model, i, layers)), d_model, feed_forward)
            for i in range(layers)
        )
        self.norm = nn.LayerNorm(d_model)
        initialise(self, layers)

    def forward(self, tokens: Tensor, scored: Tensor, losses: list[Tensor] | None = None) -> Tensor:
        """Logits [N, vocabulary] at N positions, row after row.

        Args:
            tokens: [B, T].
            scored: [B, T] bool, true at these positions; or the positions [B, n], where every row
                has n. Those are known before: a GPU need not be waited for, and models can stack.
            losses: where layers that have a loss of their own add it, see `own_loss`.
        """
        hidden = self.embedding(tokens)
        if self.positions is not None:
            hidden = hidden + self.positions.weight[: tokens.shape[1]]
        hidden, residual = self.dropout(hidden), None
        for block in self.blocks:
            adds = getattr(block.mixer, "adds_losses", False)
            how = {"auxiliary_losses": losses} if adds else {}
            hidden, residual = block(hidden, residual, **how)
        return self.norm(_chosen(residual + hidden, scored)) @ self.embedding.weight.T


def _chosen(hidden: Tensor, scored: Tensor) -> Tensor:
    """[N, C] of hidden [B, T, C]."""
    if scored.dtype == torch.bool:
        return hidden[scored]
    index = scored[..., None].expand(-1, -1, hidden.shape[-1])
    return hidden.gather(1, index).flatten(0, 1)


def initialise(model: nn.Module, layers: int) -> None:
    """The initialisation above; what a module gives in `initial_values` decides, parts first."""
    kept = kept_parts(model)
    for name, module in model.named_modules():
        if module in kept:
            continue
        if isinstance(module, nn.Linear | nn.Embedding):
            spread = SPREAD / math.sqrt(2 * layers) if name.endswith("out_proj") else SPREAD
            nn.init.normal_(module.weight, std=spread)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
    for module in reversed(list(model.modules())):
        start(module)


def parameters(model: nn.Module) -> int:
    """Number of trained parameters."""
    return sum(p.numel() for p in model.parameters())


def learned_filters(model: nn.Module) -> list[dict[str, list[list[float]]]]:
    """For each layer with filters, stream -> [N][W] of its N heads or pairs of heads, lag 0 first.

    Filters of single channels, too many to look at, are left out.
    """
    filters = [m for m in model.modules() if isinstance(m, Filters) and len(m)]
    return [layer.lists() for layer in filters if not layer.of_channels]
