"""Attention to chosen blocks in a trained model: scores of blocks, and how filters are learned.

    box, exponential    q·K̄_j with the landmarks of `cat_lm.ops.landmark.keys`
    learned             the same with a filter for each head of keys, learned afterwards
    ssm                 the same with one that is as long as the text
    random              random numbers, different in every layer
    local               j: the blocks before the nearest ones
    oracle              ln M_j, M_j the weight that dense attention gives to block j

Of a query all blocks before its own and the nearest ones are scored, and the `top_k` are read.
Learned filters of all block sizes learn in the same passes over the data, each for itself: a loss
reaches the parameters of one filter alone, and the model stays as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cat_lm.core.readers import Versioned
from cat_lm.model.attention.core import AttentionMixin
from cat_lm.model.attention.modules.call import AttentionCall
from cat_lm.model.attention.modules.landmark import LandmarkCore
from cat_lm.model.attention.patterns.landmark import Landmark
from cat_lm.model.rules import head_width, key_heads
from cat_lm.ops.landmark.attend import attend_blocks
from cat_lm.ops.landmark.layout import BlockLayout, sequence_blocks
from cat_lm.ops.landmark.select import QUERY_CHUNK, Choice, landmark_scores, select_blocks
from cat_lm.ops.landmark.teaching import block_mass, guided_loss
from cat_lm.training.landmark_calibration import QUERIES, calibrate, first_and_last_loss
from eval.lab.store import CellStore, key_hash
from eval.landmark.options import LEARNED, STATE, TOKENS, Grid, Selection

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Streams:
    """The inputs of a layer's attention from which a selector chooses blocks.

    Attributes:
        query: [B, H, T, D], key: [B, G, T, D], after convolution and rotation.
        scaling: the scaling of q·k.
        layer: its number.
    """

    query: Tensor
    key: Tensor
    scaling: float
    layer: int = 0


FIXED = ("box", "exponential")  # Filters of landmarks that have no learned parameters.
# Maps some of the queries, by index, and their layout to scores [B, H or G, R, n].
Scores = Callable[[Tensor | slice, BlockLayout], Tensor]


def make_core(config: Any, name: str, block: int, state: int = 0) -> LandmarkCore:
    """Build the module that computes landmarks with a filter; `state` is the size of the filter
    `ssm`.
    """
    options = {"filter": name, "filter_state": state, "block": block}
    return LandmarkCore(config, Landmark.options | options)


def prepared_scores(
    name: str, streams: Streams, layout: BlockLayout, local: int, core: LandmarkCore | None
) -> Scores:
    """Return the function that scores blocks for one of the selectors.

    Args:
        core: the core whose selector uses landmarks.
    """
    if core is not None:
        landmarks = core.landmarks(streams.key, layout)
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
    """Return the bytes that a layer reads to select blocks for the token after `length` tokens."""
    read = {"random": 0, "local": 0, "oracle": length}.get(name, length // block)
    return read * key_heads(config) * head_width(config) * itemsize


class Chooser(nn.Module):
    """Attends densely, to selected blocks, or densely while learned selectors are trained.

    Attributes:
        selection: None for all keys.
        learners: learned selectors by (name, block).
        local: while they are taught, the blocks that are not chosen; None otherwise.
        taught: their losses so far.
        watch: gets what every forward has for a choice.
    """

    def __init__(self, config: Any, dense: nn.Module, layer: int):
        super().__init__()
        self.config, self.dense, self.layer = config, dense, layer
        self.selection: Selection | None = None
        self.learners: Mapping[tuple[str, int], LandmarkCore] = {}
        self.local: int | None = None
        self.taught: dict[tuple[str, int], list[float]] = {}
        self.watch: Callable[[Streams], None] | None = None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, extra: Tensor | None, call: AttentionCall
    ) -> tuple[Tensor, Tensor | None]:
        """Attend: query [B, H, T, D], key and value [B, H or fewer, T, D] to [B, T, H, D]."""
        streams = Streams(query, key, call.scaling, self.layer)
        if self.watch is not None:
            self.watch(streams)
        if self.local is not None and call.losses is not None:
            self._teach(streams, call)
        if self.selection is None:
            return self.dense(query, key, value, extra, call)
        chosen = self.selection
        layout = _layout(streams, chosen.block, call)
        core = self.learners.get((chosen.select, chosen.block))
        if chosen.select in FIXED:
            core = make_core(self.config, chosen.select, chosen.block)
        scores = prepared_scores(chosen.select, streams, layout, chosen.local, core)
        choice, groups = Choice(chosen.top_k, chosen.local), key_heads(self.config)
        parts = []
        for start in range(0, query.shape[2], QUERY_CHUNK):
            rows = slice(start, start + QUERY_CHUNK)
            own = layout.of_queries(rows)
            parts.append(select_blocks(scores(rows, own), own, choice, groups))
        found = torch.cat(parts, dim=2)
        output, _ = attend_blocks(
            "sdpa", query, key, value, found, layout, chosen.local, call.scaling, 0.0
        )
        return output.transpose(1, 2).contiguous(), None

    def _teach(self, streams: Streams, call: AttentionCall) -> None:
        """Append the guided loss of every learned selector."""
        for name, core in self.learners.items():
            layout = _layout(streams, name[1], call)
            landmarks, sharpness = core.landmarks(streams.key, layout), core.sharpness.exp()
            products = streams.query, streams.key, landmarks
            loss = guided_loss(*products, layout, self.local, streams.scaling, sharpness, QUERIES)
            self.taught.setdefault(name, []).append(loss.item())
            call.losses.append(loss)


def _layout(streams: Streams, block: int, call: AttentionCall) -> BlockLayout:
    length, device = streams.query.shape[2], streams.query.device
    return sequence_blocks(length, block, call.documents, call.padding, device)


def add_choosers(model: nn.Module) -> list[Chooser]:
    """Wrap every layer's core in a `Chooser`, and return these in the order of the layers."""
    found = []
    for module in model.modules():
        if isinstance(module, AttentionMixin):
            module.core = Chooser(model.config, module.core, len(found))
            found.append(module.core)
    return found


class _Learned(Versioned):
    """The parameters of the learned filters, in a list of the layers' filters."""

    parameters: dict[str, Any]


def learn(
    model: PreTrainedModel,
    choosers: Sequence[Chooser],
    grid: Grid,
    length: int,
    folder: Path,
    identity: dict[str, Any],
) -> str:
    """Load the learned selectors from `folder`, or train and store them there.

    Args:
        grid: has the selectors, the block sizes, and the data to learn from.
        length: the length of the windows of these data.
        identity: identifies the model and the data of a training.

    Returns:
        The name under which they are kept, which tells them from all others.

    Raises:
        UserError: data that do not serve, see `calibrate`; or a damaged file.
    """
    names = [name for name in dict.fromkeys(grid.select) if name in LEARNED]
    tokens, state = grid.tokens or TOKENS, grid.state or STATE
    for chooser in choosers:
        chooser.learners = {
            (name, block): make_core(model.config, name, block, state * (name == "ssm")).to(
                model.device
            )
            for block in grid.blocks
            for name in names
        }
    sizes = {"local": grid.local, "tokens": tokens, "length": length}
    key = identity | {"names": names, "blocks": list(grid.blocks), **sizes}
    if "ssm" in names:
        key["state"] = state
    store, name = CellStore(folder, _Learned), key_hash(key)
    every = nn.ModuleList(nn.ModuleList(chooser.learners.values()) for chooser in choosers)
    if (kept := store.read(name)) is not None:
        every.load_state_dict({key: torch.tensor(x) for key, x in kept["parameters"].items()})
        return name
    for chooser in choosers:
        chooser.local = grid.local
    calibrate(model, every.parameters(), grid.calibrate, tokens, length)
    for chooser in choosers:
        chooser.local = None
    for what, block in choosers[0].taught:
        losses = torch.tensor([chooser.taught[what, block] for chooser in choosers]).mean(dim=0)
        first, last = first_and_last_loss(losses.tolist())
        print(f"{what}, block {block}: loss {first:.4f} at first, {last:.4f}", file=sys.stderr)
    store.write(name, {"parameters": {key: x.tolist() for key, x in every.state_dict().items()}})
    return name
