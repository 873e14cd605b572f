"""The cache of landmark attention: keys and values in buffers that double, and landmarks.

A token costs no copy of those before it, and a landmark is made once, when its block is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cat_lm.model.cache import LayerStateMixin, StateDynamicLayer, StateStaticLayer

# Makes landmarks [B, H, m, D] of blocks of keys [B, H, m, b, D] and the state before them, None at
# the beginning; and the state after them, None where each block stands for itself.
Summary = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
# Tokens that a new buffer has room for beside those it is made for.
_SPARE_TOKENS = 64


class LandmarkMixin(LayerStateMixin):
    """Adds landmarks to a cache layer.

    Attributes:
        landmarks: [B, H, at least n, D]; those of incomplete blocks are none's.
        padding: for each row the slots of padding that it begins with; empty before the first
            token.
        block_state: [B, ...], with which landmarks go on; None where they do not.
        covered: for each row the blocks that it is the state after.
        ends_in_padding: whether a row's newest token is padding behind real ones.
    """

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
        """Make the landmarks of the blocks that the newest tokens complete.

        Call it after their keys are stored.

        Args:
            time: how many tokens are new.
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
        begins = padding == past  # rows of padding alone
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
        """Make the landmarks of blocks `first` to `last` of rows that begin with `pad` slots."""
        batch, heads, _, width = self.keys.shape
        index = slice(None) if len(rows) == batch else rows

        def blocks(start: int, stop: int) -> Tensor:
            keys = self.keys[index, :, pad + start * block : pad + stop * block]
            return keys.unflatten(2, (stop - start, block))

        before = None
        if self.block_state is not None and first > 0:
            before = self.block_state[index]
            if self.covered[rows[0]] != first:  # blocks were taken back: of all keys anew
                before = summary(blocks(0, first), None)[1]
        made, after = summary(blocks(first, last), before)
        old = self.landmarks
        if old is None or old.shape[2] < last:
            self.landmarks = self.keys.new_zeros(
                batch, heads, self._landmark_room(last, block), width
            )
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
        """Return the number of landmarks to make room for, at least `count`."""
        return max(count, 0 if self.landmarks is None else 2 * self.landmarks.shape[2])

    def reset(self) -> None:
        super().reset()
        self._forget()

    def _change_states(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._change_states(change)
        if self.landmarks is not None:
            self.landmarks = change(self.landmarks)
        if self.block_state is not None:
            self.block_state = change(self.block_state)
        if self.padding:
            rows = change(torch.arange(len(self.padding), device=self.keys.device)).tolist()
            self.padding = [self.padding[row] for row in rows]
            self.covered = self.covered and [self.covered[row] for row in rows]


class LandmarkDynamicLayer(LandmarkMixin, StateDynamicLayer):
    """A cache layer that grows, in buffers that double; `keys` and `values` are views of them.

    Landmarks beyond the last complete block stay after a crop, and are made anew when it fills; so
    does a state after blocks that were taken back.
    """

    _buffers: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values [B, H, T, D]; give all, [B, H, S, D]."""
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
        """Return True if keys and values still are the buffers' beginning, which can take more."""
        if self._buffers is None or self._buffers[0].shape[2] < total:
            return False
        held = zip(self._buffers, (self.keys, self.values), strict=True)
        return all(buffer[:, :, :past].is_set_to(x) for buffer, x in held)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` tokens."""
        super().crop(tokens_to_remove)
        self.padding = [min(slots, self.get_seq_length()) for slots in self.padding]

    def reset(self) -> None:
        super().reset()
        self._buffers = None


class LandmarkStaticLayer(LandmarkMixin, StateStaticLayer):
    """A cache layer of fixed length."""

    is_compileable = False  # Blocks are counted on the host: each token would be another graph.

    def _landmark_room(self, count: int, block: int) -> int:
        return self.max_cache_len // block
