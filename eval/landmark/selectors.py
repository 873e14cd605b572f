"""Ways to choose blocks: scores of blocks, for queries of a layer, and what a choice reads.

    box, exponential    q·K̄_j with the landmarks of `cat_lm.ops.landmark.keys`
    learned             the same with a filter for each head of keys, learned afterwards
    ssm                 the same with one that is as long as the text (`long_landmark_keys`)
    quest               Σ_d max(q_d min_j[d], q_d max_j[d]) ≥ every q·k of block j: Quest's bound
                        (Tang et al., 2024), by the least and the largest key of each channel
    indexer             max over the tokens of block j of q'·k', with queries and keys of their own:
                        MiniMax Sparse Attention's (2026) indexer, a query for each head of keys
                        and one key for all, normalised and rotated; learned afterwards
    random              numbers that are drawn, others in every layer
    local               j: the blocks before the nearest ones
    oracle              ln M_j, M_j the weight that dense attention gives to block j

Of a query all blocks before its own and the nearest ones are scored, and the `top_k` are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cat_lm.model.rules import head_width, key_heads
from cat_lm.ops import rotate
from cat_lm.ops.landmark.keys import block_weights, landmark_keys
from cat_lm.ops.landmark.layout import BlockLayout
from cat_lm.ops.landmark.long_keys import long_landmark_keys
from cat_lm.ops.landmark.select import landmark_scores
from cat_lm.ops.landmark.teaching import block_mass
from cat_lm.ops.long_filter import filters
from eval.landmark.choices import LEARNED


@dataclass(frozen=True)
class Streams:
    """What a layer's attention has for a choice.

    Attributes:
        query: [B, H, T, D], key: [B, G, T, D], after convolution and rotation.
        hidden: what the layer's projections read, [B, T, C].
        rotary: cosines and sines of the positions, or None.
        scaling: of q·k.
        layer: its number.
    """

    query: Tensor
    key: Tensor
    hidden: Tensor
    rotary: tuple[Tensor, Tensor] | None
    scaling: float
    layer: int = 0


# From some of the queries, by their numbers, and their layout to scores [B, H or G, R, n].
Scores = Callable[[Tensor | slice, BlockLayout], Tensor]


class LearnedFilter(nn.Module):
    """A filter for each head of keys, and how sharply its scores tell blocks apart.

    It starts as in `cat_lm.model.landmark.LandmarkCore`: one of b lags as the box, one as long as
    the text as the exponential one.

    Args:
        state: its numbers of state for each channel; 0 for a filter of b lags.
    """

    learning_rate = 1e-2

    def __init__(self, config: Any, block: int, state: int = 0):
        super().__init__()
        heads, self.state = key_heads(config), state
        if state:
            start = filters.get("ssm").average(heads, state, block)
        else:
            start = block_weights("box", block).float().expand(heads, -1).clone()
        self.filter = nn.Parameter(start)
        sharp = torch.full((config.num_attention_heads,), head_width(config) ** 0.5)
        self.sharpness = nn.Parameter(sharp.log())

    def prepared(self, streams: Streams, layout: BlockLayout) -> Scores:
        """Make the landmarks, whose products with queries are the scores."""
        if self.state:
            modes = filters.get("ssm").modes_of(self.filter, self.state)
            landmarks = long_landmark_keys(streams.key, modes, layout)
        else:
            landmarks = landmark_keys(streams.key, self.filter, layout, carries=False)
        return lambda rows, _: landmark_scores(streams.query[:, :, rows], landmarks)

    def logits(self, scores: Tensor, scaling: float) -> Tensor:
        """Make the logits of the loss.

        A choice does without: heads that share one are weighed against each other by plain scores,
        as in `LandmarkCore`.
        """
        return scores * (self.sharpness.exp()[:, None, None] * scaling)


class Indexer(nn.Module):
    """Queries and keys of its own, of a head's width."""

    learning_rate = 2e-3

    def __init__(self, config: Any):
        super().__init__()
        self.heads, self.width = key_heads(config), head_width(config)
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.width, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(self.width), nn.RMSNorm(self.width)

    def prepared(self, streams: Streams, layout: BlockLayout) -> Scores:
        """Project queries and keys, and score every token of a block for the block's score."""
        query = self.q_norm(self.q_proj(streams.hidden).unflatten(2, (self.heads, self.width)))
        key = self.k_norm(self.k_proj(streams.hidden))[:, :, None]
        if streams.rotary is not None:
            query, key = rotate(query, *streams.rotary), rotate(key, *streams.rotary)
        query, key = query.transpose(1, 2), key.transpose(1, 2)  # [B, G, T, D] and [B, 1, T, D]
        blocks = layout.blocks_of(key)[:, 0]

        def scores(rows: Tensor | slice, _: BlockLayout) -> Tensor:
            products = torch.einsum("bgtd,bnwd->bgtnw", query[:, :, rows], blocks)
            return products.amax(dim=-1) * self.width**-0.5

        return scores

    def logits(self, scores: Tensor, scaling: float) -> Tensor:
        """Take the scores for the logits of the loss; they have a scaling of their own."""
        return scores


def learner(name: str, config: Any, block: int, state: int) -> nn.Module:
    """Make one of the selectors that are learned, as it starts; the same every time.

    Args:
        state: of `ssm`, see `LearnedFilter`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "indexer":
            return Indexer(config)
        return LearnedFilter(config, block, state if name == "ssm" else 0)


def prepared_scores(
    name: str, streams: Streams, layout: BlockLayout, local: int, module: nn.Module | None
) -> Scores:
    """Make what gives the scores of blocks by one of the selectors.

    Args:
        module: of a selector in LEARNED.
    """
    if name in LEARNED:
        return module.prepared(streams, layout)
    if name in ("box", "exponential"):
        weights = block_weights(name, layout.block).to(streams.key.device)
        landmarks = landmark_keys(streams.key, weights, layout, name == "exponential")
        return lambda rows, _: landmark_scores(streams.query[:, :, rows], landmarks)
    if name == "quest":
        return _bounds(streams, layout)
    if name == "oracle":
        return lambda rows, own: block_mass(
            streams.query[:, :, rows], streams.key, own, local, streams.scaling
        ).log()
    shape = streams.query.shape[:2]
    count = layout.numbers.shape[1]
    numbers = torch.arange(count, device=streams.key.device, dtype=torch.float32)
    if name == "local":
        return lambda _, own: numbers.expand(*shape, own.slots.shape[0], count)
    generator = torch.Generator().manual_seed(streams.layer)
    return lambda _, own: torch.rand(*shape, own.slots.shape[0], count, generator=generator).to(
        numbers
    )


def _bounds(streams: Streams, layout: BlockLayout) -> Scores:
    blocks = layout.blocks_of(streams.key)
    least, largest = blocks.amin(dim=3), blocks.amax(dim=3)

    def scores(rows: Tensor | slice, _: BlockLayout) -> Tensor:
        query = streams.query[:, :, rows]
        return landmark_scores(query.clamp(min=0), largest) + landmark_scores(
            query.clamp(max=0), least
        )

    return scores


def selector_bytes(name: str, config: Any, length: int, block: int, itemsize: int) -> int:
    """Count the bytes that a layer reads to choose blocks for a token after `length`."""
    keys = key_heads(config) * head_width(config) * itemsize
    blocks = length // block
    return {
        "quest": 2 * blocks * keys,
        "indexer": length * head_width(config) * itemsize,
        "random": 0,
        "local": 0,
        "oracle": length * keys,
    }.get(name, blocks * keys)
