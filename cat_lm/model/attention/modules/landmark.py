"""Landmark attention: landmarks of the keys, block selection, attention to blocks, and the cache.

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
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cat_lm.core.parameters import NothingDecays
from cat_lm.model.attention.modules.call import (
    AttentionCall,
    attend_within_borders,
    computing_dtype,
    why_no_kernel,
)
from cat_lm.model.cache import LayerStateMixin, StateDynamicLayer, StateStaticLayer
from cat_lm.model.sequence import SequenceGroup, own_heads
from cat_lm.ops.landmark.attend import attend_blocks, choose_backend
from cat_lm.ops.landmark.decode import can_decode, decode
from cat_lm.ops.landmark.keys import (
    block_weights,
    initial_parameters,
    landmark_keys,
    next_landmarks,
)
from cat_lm.ops.landmark.layout import BlockLayout, cached_blocks, sequence_blocks
from cat_lm.ops.landmark.options import CALIBRATE, DENSE, TAUGHT, is_sharp
from cat_lm.ops.landmark.select import Choice, choose_blocks
from cat_lm.ops.landmark.teaching import attend_densely, guided_loss
from cat_lm.ops.long_filter import filters
from cat_lm.ops.long_filter.filters import Modes

if TYPE_CHECKING:
    from cat_lm.model.attention.settings import AttentionSettings

# Maps blocks of keys [B, H, m, b, D] and the state before them (None at the beginning) to landmarks
# [B, H, m, D] and the state after them (None if blocks are independent).
Summary = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
# The slots that a new buffer has beyond the tokens it is made for.
_SPARE_TOKENS = 64


class LandmarkCore(NothingDecays):
    """Attends to the blocks that landmarks select.

    Parameters: `filter` [heads of keys, b], lag 0 first, if it is learned, or [heads of keys, P],
    the numbers of filters as long as the text; with either `sharpness` θ [H], else ln(D) / 2.

    Attributes:
        training_by: the computation in training, see `train_landmarks`.
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
        return self.training_by in TAUGHT

    def initial_values(self) -> dict[str, Tensor]:
        """Return the initial θ = ln(D) / 2, and filters: the box, or for long filters the
        exponential.
        """
        config, heads = self.config, self.config.stream_heads("k")
        sharp = is_sharp(self.filter_name, self.filter_state)
        shape = heads, config.num_attention_heads, config.head_width
        values = initial_parameters(self.filter_name, self.block, *shape, sharp)
        if self.long_filter is not None:
            values["filter"] = self.long_filter.average(heads, self.filter_state, self.block)
        return values

    def _weights(self, device: torch.device, group: SequenceGroup | None = None) -> Tensor | Modes:
        if self.long_filter is None and self.filter_name != "learned":
            return block_weights(self.filter_name, self.block).to(device)
        # Clone, because an engine may release the parameter after this forward.
        own = own_heads(group, self.filter).clone()
        return self.long_filter.modes_of(own, self.filter_state) if self.long_filter else own

    def summarise(self, blocks: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the landmarks of blocks of keys and the state after them, see `Summary`."""
        weights = self._weights(blocks.device)
        return next_landmarks(blocks, weights, self.filter_name == "exponential", before)

    def landmarks(
        self, key: Tensor, layout: BlockLayout, group: SequenceGroup | None = None
    ) -> Tensor:
        """Compute the landmarks [B, G, n, D] of keys [B, G, T, D]."""
        weights = self._weights(key.device, group)
        return landmark_keys(key, weights, layout, self.filter_name == "exponential")

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, extra: None, call: AttentionCall
    ) -> tuple[Tensor, Tensor | None]:
        attend = self._attend_whole if call.state is None else self._continue
        output, maps = attend(query, key, value, call)
        return output.transpose(1, 2).contiguous(), maps

    def _attend_whole(
        self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor | None]:
        time, way = query.shape[2], self.training_by if self.training else "hard"
        layout = sequence_blocks(time, self.block, call.documents, call.padding, key.device)
        taught = [x.detach() if way == CALIBRATE else x for x in (query, key)]
        landmarks = self.landmarks(taught[1], layout, call.group)
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
        selected = choose_blocks(query, landmarks, layout, self.choice)
        return attend_blocks(
            self.config._attn_implementation, query, key, value, selected, layout,
            self.choice.local, call.scaling, call.dropout,
        )  # fmt: skip

    def _continue(
        self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor | None]:
        time = query.shape[2]
        past, padding = call.state.add_landmarks(time, call.padding, self.block, self.summarise)
        landmarks = call.state.landmarks
        if landmarks is None:  # No block is complete yet.
            landmarks = key[:, :, :0]
        by = self.config._attn_implementation
        is_gathered = choose_backend(by, time, key.shape[2], call.dropout) == "gather"
        if is_gathered and can_decode(query, key, value):
            how = torch.tensor(padding), self.block, self.choice, call.scaling
            return decode(query, key, value, landmarks, past, *how), None
        slots = torch.tensor(padding, device=key.device)
        # The cache stores no landmarks of blocks that no row has.
        layout = cached_blocks(past, time, self.block, slots, min(padding))
        landmarks = landmarks[:, :, : layout.numbers.shape[1]]
        return self._attend(query, key, value, landmarks, layout, call)


def train_landmarks(model: nn.Module, way: str, rows: int) -> None:
    """Set the training mode of every landmark attention layer.

    Args:
        way: "hard", as otherwise; "dense", attending to all keys; "guided", the same with the
            loss of `cat_lm.ops.landmark.teaching`, which the model's outputs then have as
            `auxiliary_loss`; "calibrate", the same, of which queries and keys learn nothing.
        rows: number of queries of each row for which the loss is computed.
    """
    cores = [module for module in model.modules() if isinstance(module, LandmarkCore)]
    for core in cores:
        core.training_by, core.rows = way, rows
    if cores:
        model.collects_losses = way in TAUGHT


# The cache


class LandmarkMixin(LayerStateMixin):
    """A cache layer that also stores landmarks, each computed once when its block is complete.

    Attributes:
        landmarks: [B, H, at least n, D]; those of incomplete blocks are none's.
        padding: for each row the slots of padding that it begins with; empty before the first
            token.
        block_state: [B, ...], with which landmarks go on; None where they do not.
        covered: for each row the blocks that it is the state after.
        ends_in_padding: whether a row's newest token is padding behind real ones.
    """

    tensors = (*LayerStateMixin.tensors, "landmarks", "block_state")

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._forget()

    def _forget(self) -> None:
        self.landmarks: Tensor | None = None
        self.block_state: Tensor | None = None
        self.padding: list[int] = []
        self.covered: list[int] = []
        self.ends_in_padding = False

    def add_landmarks(
        self, time: int, padding_mask: Tensor | None, block: int, summary: Summary
    ) -> tuple[int, list[int]]:
        """Compute the landmarks of the blocks that the newest, already stored tokens complete.

        Args:
            padding_mask: [B, T] bool, of the new ones; None where all are real.

        Returns:
            How many keys came before them, and the slots of padding that rows begin with: one
            number for all rows, or one for each if they differ.

        Raises:
            ValueError: tokens follow padding that itself follows tokens.
        """
        total = int(self.get_seq_length())
        past = total - time
        self._count_padding(past, time, padding_mask)
        different = sorted(set(self.padding))
        for pad in different:
            first, last = max(0, past - pad) // block, max(0, total - pad) // block
            if first < last:
                rows = [row for row, own in enumerate(self.padding) if own == pad]
                self._summarise(rows, pad, block, first, last, summary)
        return past, different if len(different) == 1 else self.padding

    def _count_padding(self, past: int, time: int, padding_mask: Tensor | None) -> None:
        batch = self.keys.shape[0]
        self.padding = self.padding or [0] * batch
        if padding_mask is None and not self.ends_in_padding:
            return
        real = torch.ones(batch, time) if padding_mask is None else padding_mask.cpu()
        real, padding = real.bool(), torch.tensor(self.padding)
        begins = padding == past  # These rows contain only padding so far.
        follows = (~begins & ~real[:, 0] & real.any(dim=1)).any()
        if follows or (self.ends_in_padding and real.any()):
            raise ValueError(
                "attention_mask: tokens follow padding at the end of a row, where landmark "
                "attention would count blocks with gaps; pad rows at their beginning "
                "(padding_side='left')"
            )
        leading = (real.cumsum(dim=1) == 0).sum(dim=1)
        padding += torch.where(begins, leading, 0)
        self.ends_in_padding = bool((~real[:, -1] & (padding < past + time)).any())
        self.padding = padding.tolist()

    def _summarise(
        self, rows: Sequence[int], pad: int, block: int, first: int, last: int, summary: Summary
    ) -> None:
        """Compute the landmarks of blocks `first` to `last` of rows that begin with `pad` slots."""
        batch, heads, _, width = self.keys.shape
        index = slice(None) if len(rows) == batch else rows

        def blocks(start: int, stop: int) -> Tensor:
            keys = self.keys[index, :, pad + start * block : pad + stop * block]
            return keys.unflatten(2, (stop - start, block))

        before = None
        if self.block_state is not None and first > 0:
            before = self.block_state[index]
            # Blocks were dropped by a crop, so all keys are summarised again.
            if self.covered[rows[0]] != first:
                before = summary(blocks(0, first), None)[1]
        made, after = summary(blocks(first, last), before)
        old = self.landmarks
        if old is None or old.shape[2] < last:
            room = self._landmark_room(last, block)
            self.landmarks = self.keys.new_zeros(batch, heads, room, width)
            if old is not None:
                self.landmarks[:, :, : old.shape[2]] = old
        self.landmarks[index, :, first:last] = made
        if after is None:
            return
        if self.block_state is None:
            self.block_state, self.covered = after.new_zeros(batch, *after.shape[1:]), [0] * batch
        self.block_state[index] = after
        for row in rows:
            self.covered[row] = last

    def _landmark_room(self, count: int, block: int) -> int:
        return max(count, 0 if self.landmarks is None else 2 * self.landmarks.shape[2])

    def reset(self) -> None:
        super().reset()
        self._forget()

    def _change_states(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._change_states(change)
        if self.padding:
            rows = change(torch.arange(len(self.padding), device=self.keys.device)).tolist()
            self.padding = [self.padding[row] for row in rows]
            self.covered = self.covered and [self.covered[row] for row in rows]


class LandmarkDynamicLayer(LandmarkMixin, StateDynamicLayer):
    """A growing cache layer whose buffers double; `keys` and `values` are views of them.

    Landmarks beyond the last complete block stay after a crop, and are made anew when it fills; so
    does a state after blocks that were taken back.
    """

    _buffers: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        past, total = self.get_seq_length(), self.get_seq_length() + key_states.shape[2]
        if not self._has_room(past, total):
            capacity = max(2 * past, total + _SPARE_TOKENS)
            self._buffers = tuple(
                new.new_empty(*new.shape[:2], capacity, new.shape[3])
                for new in (key_states, value_states)
            )
            if past:
                for buffer, old in zip(self._buffers, (self.keys, self.values), strict=True):
                    buffer[:, :, :past] = old
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, past:total] = new
        self.keys, self.values = (buffer[:, :, :total] for buffer in self._buffers)
        return self.keys, self.values

    def _has_room(self, past: int, total: int) -> bool:
        if self._buffers is None or self._buffers[0].shape[2] < total:
            return False
        held = zip(self._buffers, (self.keys, self.values), strict=True)
        return all(buffer[:, :, :past].is_set_to(x) for buffer, x in held)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.padding = [min(slots, self.get_seq_length()) for slots in self.padding]

    def reset(self) -> None:
        super().reset()
        self._buffers = None


class LandmarkStaticLayer(LandmarkMixin, StateStaticLayer):
    """A cache layer of fixed length."""

    # The host counts the blocks, so that each token would compile another graph.
    is_compileable = False

    def _landmark_room(self, count: int, block: int) -> int:
        return self.max_cache_len // block
