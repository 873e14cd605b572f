"""The cache of landmark attention: keys and values in buffers that double, and landmarks.

A token costs no copy of those before it, and a landmark is made once, when its block is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cat_lm.model.cache import LayerStateMixin, StateDynamicLayer, StateStaticLayer
from cat_lm.ops.runtime.fake import is_fake

# Makes landmarks [B, H, m, D] of blocks of keys [B, H, m, b, D] and the state before them, None at
# the beginning; and the state after them, None where each block stands for itself.
Summary = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
# Tokens that a new buffer has room for beside those it is made for.
_SPARE_TOKENS = 64


class LandmarkMixin(LayerStateMixin):
    """Adds landmarks to a cache layer.

    Attributes:
        landmarks: [B, H, at least n, D]; those of incomplete blocks are none's.
        padding: [B] on the host, the slots of padding that rows begin with; None before the first
            token. Replaced, never changed in place.
        block_state: [B, ...], with which landmarks go on; None where they do not.
        covered: [B] on the host, the blocks that it is the state after, in each row.
        ends_in_padding: whether a row's newest token is padding behind real ones.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.landmarks: Tensor | None = None
        self.padding: Tensor | None = None
        self.block_state: Tensor | None = None
        self.covered: Tensor | None = None
        self.ends_in_padding = False
        self._different: tuple[Tensor, list[int]] | None = None

    def _paddings(self) -> list[int]:
        """The numbers that there are in `padding`, found anew only where that is another."""
        if self._different is None or self._different[0] is not self.padding:
            self._different = self.padding, self.padding.unique().tolist()
        return self._different[1]

    def add_landmarks(
        self, time: int, padding_mask: Tensor | None, block: int, summary: Summary
    ) -> tuple[int, Tensor]:
        """Make the landmarks of the blocks that the newest tokens complete.

        Call it after their keys are stored.

        Args:
            time: how many tokens are new.
            padding_mask: [B, T] bool, of the new ones; None where all are real.

        Returns:
            How many keys came before them, and the slots of padding that rows begin with, [1 or B]
            on the host: of all rows if they differ.

        Raises:
            ValueError: tokens follow padding that itself follows tokens.
        """
        total = int(self.get_seq_length())
        past = total - time
        self._count_padding(past, time, padding_mask)
        different = [0] if is_fake(self.keys) else self._paddings()
        for pad in different:
            first, last = max(0, past - pad) // block, max(0, total - pad) // block
            if first < last:
                rows = slice(None) if len(different) == 1 else (self.padding == pad).nonzero()[:, 0]
                self._summarise(rows, pad, block, first, last, summary)
        return past, self.padding[:1] if len(different) == 1 else self.padding

    def _count_padding(self, past: int, time: int, padding_mask: Tensor | None) -> None:
        batch = self.keys.shape[0]
        if self.padding is None:
            self.padding = torch.zeros(batch, dtype=torch.int64)
        if padding_mask is None and not self.ends_in_padding:
            return
        real = torch.ones(batch, time) if padding_mask is None else padding_mask.cpu()
        real = real.bool()
        begins = self.padding == past  # rows of padding alone
        follows = (~begins & ~real[:, 0] & real.any(dim=1)).any()
        if follows or (self.ends_in_padding and real.any()):
            raise ValueError(
                "attention_mask: tokens follow padding at the end of a row, where landmark "
                "attention would count blocks with gaps; pad rows at their beginning "
                "(padding_side='left')"
            )
        leading = (real.cumsum(dim=1) == 0).sum(dim=1)
        self.padding = self.padding + torch.where(begins, leading, 0)
        self.ends_in_padding = bool((~real[:, -1] & (self.padding < past + time)).any())

    def _summarise(
        self, rows: Any, pad: int, block: int, first: int, last: int, summary: Summary
    ) -> None:
        def blocks(start: int, stop: int) -> Tensor:
            keys = self.keys[rows, :, pad + start * block : pad + stop * block]
            return keys.unflatten(2, (stop - start, block))

        before = None
        if self.block_state is not None and first > 0:
            before = self.block_state[rows]
            if int(self.covered[rows][0]) != first:  # blocks were taken back: of all keys anew
                before = summary(blocks(0, first), None)[1]
        made, after = summary(blocks(first, last), before)
        self._room_for_landmarks(last, block)
        self.landmarks[rows, :, first:last] = made
        if after is not None:
            self._go_on_from(rows, after, last)

    def _go_on_from(self, rows: Any, state: Tensor, blocks: int) -> None:
        batch = self.keys.shape[0]
        if self.block_state is None:
            self.block_state = state.new_zeros(batch, *state.shape[1:])
            self.covered = torch.zeros(batch, dtype=torch.int64)
        self.block_state[rows] = state
        self.covered[rows] = blocks

    def _room_for_landmarks(self, count: int, block: int) -> None:
        old = self.landmarks
        if old is not None and old.shape[2] >= count:
            return
        batch, heads, _, width = self.keys.shape
        room = self._landmark_room(count, block)
        self.landmarks = self.keys.new_zeros(batch, heads, room, width)
        if old is not None:
            self.landmarks[:, :, : old.shape[2]] = old

    def _landmark_room(self, count: int, block: int) -> int:
        """Return the number of landmarks to make room for, at least `count`."""
        return max(count, 0 if self.landmarks is None else 2 * self.landmarks.shape[2])

    def reset(self) -> None:
        super().reset()
        self.landmarks = self.padding = self.block_state = self.covered = None
        self.ends_in_padding = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._change_counts(lambda count: count[beam_idx.cpu()])

    def _change_counts(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change what is kept of rows on the host."""
        if self.padding is not None:
            self.padding = change(self.padding)
        if self.covered is not None:
            self.covered = change(self.covered)

    def _change_states(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._change_states(change)
        if self.landmarks is not None:
            self.landmarks = change(self.landmarks)
        if self.block_state is not None:
            self.block_state = change(self.block_state)


class LandmarkDynamicLayer(LandmarkMixin, StateDynamicLayer):
    """A cache layer that grows, in buffers that double; `keys` and `values` are views of them.

    Landmarks beyond the last complete block stay after a crop, and are made anew when it fills; so
    does a state after blocks that were taken back.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._views: tuple[Tensor, Tensor] | None = None  # of the buffers, as handed out

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values [B, H, T, D]; give all, [B, H, S, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        past, total = self.get_seq_length(), self.get_seq_length() + key_states.shape[2]
        if not self._has_room(total):
            capacity = max(2 * past, total + _SPARE_TOKENS)
            self._buffers = tuple(
                _enlarged(old, new, past, capacity)
                for old, new in ((self.keys, key_states), (self.values, value_states))
            )
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, past:total] = new
        self._hand_out(total)
        return self._views

    def _has_room(self, total: int) -> bool:
        """Return True if keys and values still are the buffers' beginning, which can take more."""
        if self._views is None or self._buffers[0].shape[2] < total:
            return False
        return self.keys is self._views[0] and self.values is self._views[1]

    def _hand_out(self, length: int) -> None:
        self._views = tuple(buffer[:, :, :length] for buffer in self._buffers)
        self.keys, self.values = self._views

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` tokens."""
        fits = self._views is not None and self._has_room(0)
        super().crop(tokens_to_remove)
        if fits:
            self._hand_out(self.get_seq_length())
        if self.padding is not None:
            self.padding = self.padding.clamp(max=self.get_seq_length())

    def reset(self) -> None:
        super().reset()
        self._buffers = self._views = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._change_counts(lambda count: count.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._change_counts(lambda count: count[indices.cpu()])


class LandmarkStaticLayer(LandmarkMixin, StateStaticLayer):
    """A cache layer of fixed length."""

    is_compileable = False  # Blocks are counted on the host: each token would be another graph.

    def _landmark_room(self, count: int, block: int) -> int:
        return self.max_cache_len // block


def _enlarged(old: Tensor, new: Tensor, past: int, capacity: int) -> Tensor:
    """Make a buffer of `capacity` tokens like `new` [B, H, T, D], which begins with `old`."""
    buffer = new.new_empty(*new.shape[:2], capacity, new.shape[3])
    if past:
        buffer[:, :, :past] = old
    return buffer
