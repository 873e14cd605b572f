"""What takes the place of softmax in a model: attention to chosen blocks, and what teaches it.

A model of either family gets `Chooser`s for its layers' cores, which compute densely until they are
told a way to choose, and afterwards read only the blocks that are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cat_lm.model.attention.core import AttentionMixin
from cat_lm.model.attention.modules.call import AttentionCall
from cat_lm.model.rules import key_heads
from cat_lm.ops.landmark.attend import attend_blocks
from cat_lm.ops.landmark.layout import sequence_blocks
from cat_lm.ops.landmark.select import QUERY_CHUNK, Choice, select_blocks
from cat_lm.ops.landmark.teaching import guided_loss
from cat_lm.training.landmark_calibration import QUERIES
from eval.landmark.selectors import LearnedFilter, Streams, prepared_scores


@dataclass(frozen=True)
class Selection:
    """Say how a layer chooses: by which selector, of blocks of which size, and how many."""

    name: str
    block: int
    top_k: int
    local: int


class Chooser(nn.Module):
    """Attend densely; or to chosen blocks; or densely while learned selectors are taught.

    Args:
        layer: its number.

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
        self.learners: Mapping[tuple[str, int], LearnedFilter] = {}
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
        layout = sequence_blocks(
            query.shape[2], chosen.block, call.documents, call.padding, query.device
        )
        module = self.learners.get((chosen.name, chosen.block))
        scores = prepared_scores(chosen.name, streams, layout, chosen.local, module)
        choice, groups = Choice(chosen.top_k, chosen.local), key_heads(self.config)
        parts = []
        for start in range(0, query.shape[2], QUERY_CHUNK):
            rows = slice(start, start + QUERY_CHUNK)
            own = layout.of_queries(rows)
            parts.append(select_blocks(scores(rows, own), own, choice, groups))
        output, _ = attend_blocks(
            "sdpa", query, key, value, torch.cat(parts, dim=2), layout, chosen.local,
            call.scaling, 0.0,
        )  # fmt: skip
        return output.transpose(1, 2).contiguous(), None

    def _teach(self, streams: Streams, call: AttentionCall) -> None:
        """Add the guided loss of every learner."""
        query, key = streams.query, streams.key
        for name, module in self.learners.items():
            layout = sequence_blocks(
                query.shape[2], name[1], call.documents, call.padding, query.device
            )
            landmarks, sharpness = module.landmarks(key, layout), module.sharpness.exp()
            loss = guided_loss(
                query, key, landmarks, layout, self.local, streams.scaling, sharpness, QUERIES
            )
            self.taught.setdefault(name, []).append(loss.item())
            call.losses.append(loss)


def add_choosers(model: nn.Module) -> list[Chooser]:
    """Put a `Chooser` around every layer's core, and return them in the order of the layers."""
    found = []
    for module in model.modules():
        if isinstance(module, AttentionMixin):
            module.core = Chooser(model.config, module.core, len(found))
            found.append(module.core)
    return found
