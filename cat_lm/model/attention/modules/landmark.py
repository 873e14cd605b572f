"""Landmark attention's module: landmarks of the keys, the choice of blocks, attention to them.

Of query t of a document, with blocks of b tokens, c(t) its own block and K̄_j the landmark of block
j (`cat_lm.ops.landmark.keys`):

    S_t = the `top_k` blocks j ≤ c(t) − local with the highest q_t·K̄_j, and those after
          c(t) − local, and with `sink` the first block.

Query t attends to {m ≤ t : m is in a block of S_t} in one softmax, which is the paper's definition
(CAT, section 5) with two corrections: the blocks to choose from lie before the query, and the keys
attended to are not the filtered ones. MoBA with k blocks is `filter: box`, `local: 1`,
`top_k: k − 1`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cat_lm.core.parameters import NothingDecays
from cat_lm.model.attention.documents import (
    attend_within_borders,
    computing_dtype,
    why_no_kernel,
)
from cat_lm.model.attention.modules.call import AttentionCall
from cat_lm.model.sequence import SequenceGroup, own_heads
from cat_lm.ops.landmark.attend import attend_blocks, choose_backend
from cat_lm.ops.landmark.decode import can_decode, decode
from cat_lm.ops.landmark.keys import (
    block_weights,
    initial_parameters,
    landmark_keys,
    long_landmark_keys,
    next_landmarks,
    next_long_landmarks,
)
from cat_lm.ops.landmark.layout import BlockLayout, cached_blocks, sequence_blocks
from cat_lm.ops.landmark.options import CALIBRATE, DENSE, TAUGHT, is_sharp
from cat_lm.ops.landmark.select import Choice, choose_blocks
from cat_lm.ops.landmark.teaching import attend_densely, guided_loss
from cat_lm.ops.long_filter import filters
from cat_lm.ops.long_filter.filters import Modes

if TYPE_CHECKING:
    from cat_lm.model.attention.settings import AttentionSettings


class LandmarkCore(NothingDecays):
    """Attends to the blocks that landmarks find.

    Parameters: `filter` [heads of keys, b], lag 0 first, if it is learned, or [heads of keys, P],
    the numbers of filters as long as the text; `sharpness` θ [H] if there is a filter; else θ is
    ln(D) / 2.

    Attributes:
        training_by: what is computed in training, see `train_landmarks`.
        rows: the queries of a row on which landmarks are taught.
    """

    def __init__(self, config: AttentionSettings, options: dict[str, Any]):
        super().__init__()
        self.config = config
        self.block = options["block"]
        self.filter_name, self.filter_state = options["filter"], options["filter_state"]
        self.long_filter = filters.get(self.filter_name) if self.filter_state else None
        self.training_by, self.rows = "hard", 0
        self.choice = Choice(options["top_k"], options["local"], options["sink"], options["share"])
        for name, values in self.initial_values().items():
            self.register_parameter(name, nn.Parameter(values))

    @property
    def adds_losses(self) -> bool:
        """Return True if training has a loss of the landmarks."""
        return self.training_by in TAUGHT

    def initial_values(self) -> dict[str, Tensor]:
        """Return the parameters as they start, θ = ln(D) / 2.

        The filter starts as the box, one that is as long as the text as the fixed exponential one.
        """
        config, heads = self.config, self.config.stream_heads("k")
        values = initial_parameters(
            self.filter_name,
            self.block,
            heads,
            config.num_attention_heads,
            config.head_width,
            is_sharp(self.filter_name, self.filter_state),
        )
        if self.long_filter is not None:
            values["filter"] = self.long_filter.average(heads, self.filter_state, self.block)
        return values

    def _weights(self, device: torch.device, group: SequenceGroup | None = None) -> Tensor | Modes:
        """Return the filter [1 or heads of keys, b], lag 0 first, or one as long as the text."""
        if self.long_filter is None and self.filter_name != "learned":
            return block_weights(self.filter_name, self.block).to(device)
        # A copy, because an engine may take the parameter away after this forward.
        own = own_heads(group, self.filter).clone()
        return self.long_filter.modes_of(own, self.filter_state) if self.long_filter else own

    def summarise(self, blocks: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Make landmarks of blocks [B, H, m, b, D] and the state after them, for a cache's layer.

        Args:
            before: that state after the blocks before them; None at the beginning.
        """
        weights = self._weights(blocks.device)
        if self.long_filter is not None:
            return next_long_landmarks(blocks, weights, before)
        return next_landmarks(blocks, weights, self.filter_name == "exponential", before)

    def _landmarks(self, key: Tensor, layout: BlockLayout, group: SequenceGroup | None) -> Tensor:
        """Make the landmarks [B, H, n, D] of whole rows of keys."""
        weights = self._weights(key.device, group)
        if self.long_filter is not None:
            return long_landmark_keys(key, weights, layout)
        return landmark_keys(key, weights, layout, self.filter_name == "exponential")

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, extra: None, call: AttentionCall
    ) -> tuple[Tensor, Tensor | None]:
        """Attend: query [B, H, T, D], key and value [B, H or fewer, S, D] to [B, T, H, D]."""
        attend = self._attend_whole if call.state is None else self._continue
        output, maps = attend(query, key, value, call)
        return output.transpose(1, 2).contiguous(), maps

    def _attend_whole(
        self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with all tokens of a row: [B, H, T, D], and maybe the maps."""
        time, way = query.shape[2], self.training_by if self.training else "hard"
        layout = sequence_blocks(time, self.block, call.documents, call.padding, key.device)
        taught = [x.detach() if way == CALIBRATE else x for x in (query, key)]
        landmarks = self._landmarks(taught[1], layout, call.group)
        if way in TAUGHT and call.losses is not None:
            sharpness = math.sqrt(self.config.head_width)
            if "sharpness" in self._parameters:
                sharpness = own_heads(call.group, self.sharpness).exp()
            how = self.choice.local, call.scaling, sharpness, self.rows
            call.losses.append(guided_loss(*taught, landmarks, layout, *how))
        if way not in DENSE:
            return self._attend(query, key, value, landmarks, layout, call)
        how = call.scaling, call.dropout
        kind = query.device, computing_dtype(query), query.shape[3]
        if call.document_borders is not None and why_no_kernel(*kind) is None:
            output = attend_within_borders(query, key, value, call.document_borders, *how)
            return output.transpose(1, 2), None
        is_plain = call.documents is None and call.padding is None
        return attend_densely(query, key, value, layout, *how, is_plain), None

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        landmarks: Tensor,
        layout: BlockLayout,
        call: AttentionCall,
    ) -> tuple[Tensor, Tensor | None]:
        """Choose blocks and attend to them: [B, H, T, D], and maybe the maps."""
        selected = choose_blocks(query, landmarks, layout, self.choice)
        return attend_blocks(
            self.config._attn_implementation, query, key, value, selected, layout,
            self.choice.local, call.scaling, call.dropout,
        )  # fmt: skip

    def _continue(
        self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to the keys of a cache [B, H, S, D], whose newest are the queries' own."""
        time = query.shape[2]
        past, padding = call.state.add_landmarks(time, call.padding, self.block, self.summarise)
        landmarks = call.state.landmarks
        if landmarks is None:  # no block is complete
            landmarks = key[:, :, :0]
        by = self.config._attn_implementation
        is_gathered = choose_backend(by, time, key.shape[2], call.dropout) == "gather"
        if is_gathered and can_decode(query, key, value):
            how = torch.tensor(padding), self.block, self.choice, call.scaling
            return decode(query, key, value, landmarks, past, *how), None
        slots = torch.tensor(padding, device=key.device)
        # The cache has no landmarks of blocks that no row has.
        layout = cached_blocks(past, time, self.block, slots, min(padding))
        landmarks = landmarks[:, :, : layout.numbers.shape[1]]
        return self._attend(query, key, value, landmarks, layout, call)


def train_landmarks(model: nn.Module, way: str, rows: int) -> None:
    """Set how a model with landmark attention computes while it is trained.

    Args:
        way: "hard", as otherwise; "dense", attending to all keys; "guided", the same with the
            loss of `cat_lm.ops.landmark.teaching`, which the model's outputs then have as
            `auxiliary_loss`; "calibrate", the same, of which queries and keys learn nothing.
        rows: for how many queries of each row the loss is computed.
    """
    cores = [module for module in model.modules() if isinstance(module, LandmarkCore)]
    for core in cores:
        core.training_by, core.rows = way, rows
    if cores:
        model.collects_losses = way in TAUGHT
