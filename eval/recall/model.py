"""Zoology's language model around a mixer: embeddings, blocks, tied output.

    h = D(embeddings);  each layer:  h = h + mixer(LN₁ h),  h = h + LN₂ h;  LN_f(h)

with dropout D of the embeddings, no state mixer (Identity; a language model has h = h + MLP(LN₂ h)
there, GELU and four times as wide), learned positions only where the mixer asks for them, and its
initialisation: N(0, 0.02) for every Linear and Embedding with zero biases, N(0, 0.02/√(2·layers))
for `out_proj`; everything else keeps its own. Mamba's block is h = h + mixer(RMS h), without
dropout.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from cat_lm.core.parameters import apply_initial_values, self_initialised_modules
from cat_lm.mixers import Mixer, Setting
from cat_lm.model.blocks.residual import Block
from cat_lm.model.context import Context
from cat_lm.model.streams.operations import LongFilter
from cat_lm.model.streams.pipeline import StreamPipeline
from cat_lm.ops.long_filter.chunks import taps_of
from eval.recall.cell import dropout_of

SPREAD = 0.02
_SHOWN = 64  # number of taps that are shown of an infinite filter


def make_block(mixer: Mixer, setting: Setting, feed_forward: bool) -> Block:
    """Make a layer. Raises ValueError: Mamba's block with a feed-forward network."""
    width, layer = setting.d_model, mixer.build(setting)
    if mixer.kind.block == "rms":
        if feed_forward:
            raise ValueError("Mamba's block has no feed-forward network beside it")
        return Block(nn.RMSNorm(width, eps=1e-5), layer)
    network: nn.Module = nn.Identity()
    if feed_forward:
        wide = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        network = nn.Sequential(*wide)
    return Block(nn.LayerNorm(width), layer, nn.LayerNorm(width), network)


class RecallModel(nn.Module):
    """Token ids [B, T] to logits at chosen positions.

    Args:
        layers: number of blocks; none: the mixer's own.
        positions: rows of the position table, where the mixer has one: the longest T.
        feed_forward: whether blocks have a feed-forward network, as language models have.
        dropout: the dropout of the embeddings; none: the block's own.
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
        self.dropout = nn.Dropout(dropout_of(mixer, dropout))
        self.blocks = nn.ModuleList(
            make_block(mixer, Setting(d_model, i, layers), feed_forward) for i in range(layers)
        )
        self.norm = nn.LayerNorm(d_model)
        initialise(self, layers)

    def forward(self, tokens: Tensor, scored: Tensor, losses: list[Tensor] | None = None) -> Tensor:
        """Return logits [N, vocabulary] at N positions, row after row.

        Args:
            tokens: [B, T].
            scored: [B, T] bool, true at these positions; or the positions [B, n], where every row
                has n. Those are known before: a GPU need not be waited for, and models can stack.
            losses: where layers that have a loss of their own add it, see `own_loss`.
        """
        hidden = self.embedding(tokens)
        if self.positions is not None:
            hidden = hidden + self.positions.weight[: tokens.shape[1]]
        hidden, context = self.dropout(hidden), Context(losses=losses)
        for block in self.blocks:
            hidden = block(hidden, context)
        return self.norm(_chosen(hidden, scored)) @ self.embedding.weight.T


def _chosen(hidden: Tensor, scored: Tensor) -> Tensor:
    """Return the hidden states [N, C] at the scored positions of hidden [B, T, C]."""
    if scored.dtype == torch.bool:
        return hidden[scored]
    index = scored[..., None].expand(-1, -1, hidden.shape[-1])
    return hidden.gather(1, index).flatten(0, 1)


def initialise(model: nn.Module, layers: int) -> None:
    """Initialise a model as described above; a module's own `initial_values` take precedence."""
    kept = self_initialised_modules(model)
    for name, module in model.named_modules():
        if module in kept:
            continue
        if isinstance(module, nn.Linear | nn.Embedding):
            spread = SPREAD / math.sqrt(2 * layers) if name.endswith("out_proj") else SPREAD
            nn.init.normal_(module.weight, std=spread)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
    for module in reversed(list(model.modules())):
        apply_initial_values(module)


def _filters_as_lists(convolution: StreamPipeline) -> dict[str, list[list[float]]]:
    """Return each stream's filters as [N][W], lag 0 first: N heads, or pairs, or channels.

    Of filters as long as the row the first 64 taps.
    """
    found, own = {}, convolution.filter
    for stream, filters in convolution.filters().items():
        if isinstance(own, LongFilter):
            taps = taps_of(own.kind.modes_of(filters.detach(), own.size), _SHOWN)
        else:
            taps = filters.detach().movedim(own.kind.window_axis, -1)
        found[stream] = taps.reshape(-1, taps.shape[-1]).tolist()
    return found


def learned_filters(model: nn.Module) -> list[dict[str, list[list[float]]]]:
    """Return stream -> filters [N][W] for each layer with filters, lag 0 first.

    Filters of single channels, too many to look at, are left out.
    """
    layers = [m for m in model.modules() if isinstance(m, StreamPipeline)]
    return [
        _filters_as_lists(m)
        for m in layers
        if isinstance(m.filter, LongFilter) or "D" not in m.filter.kind.filter_axes
    ]
