"""Ways to choose blocks: scores of blocks, for queries of a layer, and what a choice reads.

    box, exponential    q·K̄_j with the landmarks of `cat_lm.ops.landmark.keys`
    learned             the same with a filter for each head of keys, learned afterwards
    ssm                 the same with one that is as long as the text
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
from cat_lm.ops.landmark.keys import block_weights, landmark_keys
from cat_lm.ops.landmark.layout import BlockLayout
from cat_lm.ops.landmark.select import landmark_scores
from cat_lm.ops.landmark.teaching import block_mass
from cat_lm.ops.long_filter import filters
from eval.landmark.choices import LEARNED


@dataclass(frozen=True)
class Streams:
    """What a layer's attention has for a choice.

    Attributes:
        query: [B, H, T, D], key: [B, G, T, D], after convolution and rotation.
        scaling: of q·k.
        layer: its number.
    """

    query: Tensor
    key: Tensor
    scaling: float
    layer: int = 0


# From some of the queries, by their numbers, and their layout to scores [B, H or G, R, n].
Scores = Callable[[Tensor | slice, BlockLayout], Tensor]


class LearnedFilter(nn.Module):
    """A filter for each head of keys, and how sharply its scores tell blocks apart.

    It starts as in `LandmarkCore`: one of b lags as the box, one as long as
    the text as the exponential one.

    Args:
        state: its numbers of state for each channel; 0 for a filter of b lags.
    """

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

    def landmarks(self, key: Tensor, layout: BlockLayout) -> Tensor:
        """Make the landmarks [B, G, n, D], whose products with queries are the scores."""
        if self.state:
            modes = filters.get("ssm").modes_of(self.filter, self.state)
            return landmark_keys(key, modes, layout)
        return landmark_keys(key, self.filter, layout, carries=False)


def prepared_scores(
    name: str, streams: Streams, layout: BlockLayout, local: int, module: LearnedFilter | None
) -> Scores:
    """Make what gives the scores of blocks by one of the selectors.

    Args:
        module: of a selector in LEARNED.
    """
    if name in (*LEARNED, "box", "exponential"):
        if name in LEARNED:
            landmarks = module.landmarks(streams.key, layout)
        else:
            weights = block_weights(name, layout.block).to(streams.key.device)
            landmarks = landmark_keys(streams.key, weights, layout, name == "exponential")
        return lambda rows, _: landmark_scores(streams.query[:, :, rows], landmarks)
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


def selector_bytes(name: str, config: Any, length: int, block: int, itemsize: int) -> int:
    """Count the bytes that a layer reads to choose blocks for a token after `length`."""
    keys = key_heads(config) * head_width(config) * itemsize
    blocks = length // block
    return {
        "random": 0,
        "local": 0,
        "oracle": length * keys,
    }.get(name, blocks * keys)
