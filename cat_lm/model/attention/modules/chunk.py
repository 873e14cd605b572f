"""The module of `attention: chunk`: rows split into blocks of the chunk size, and decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.model.attention.modules.call import AttentionCall, visible_keys

if TYPE_CHECKING:
    from cat_lm.model.attention.settings import AttentionSettings


class ChunkCore(nn.Module):
    """Attends inside chunks; transforms of scores count positions from a chunk's beginning.

    Args:
        size: tokens of a chunk.
    """

    def __init__(self, size: int, config: AttentionSettings):
        super().__init__()
        self.size, self.config = size, config

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, extra: None, call: AttentionCall
    ) -> tuple[Tensor, Tensor | None]:
        if call.continues or call.mask is not None:
            return self._masked(query, key, value, call)
        if call.documents is None and call.padding is None:
            return self._whole(query, key, value, call), None
        return self._in_pairs(query, key, value, call), None

    def _masked(
        self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with a mask [T, S]: after a cache, and if maps are requested."""
        own, keys = call.query_positions, call.key_positions
        if query.shape[2] == 1 and call.mask is None:
            # Padding occupies no slot here, so that older keys belong to other chunks.
            key, value = (x[:, :, -self.size :] for x in (key, value))
            keys = keys[:, -self.size :]
        visible = own[:, None, :, None] // self.size == keys[:, None, None] // self.size
        known = visible_keys(call.mask, query, key)
        visible = visible if known is None else visible & known
        mask = visible
        if self.config._attn_implementation == "eager":  # `eager` adds its mask to the scores.
            least = torch.finfo(query.dtype).min
            mask = query.new_zeros(visible.shape).masked_fill(~visible, least)
        return call.attend(query, key, value, mask, own % self.size, keys % self.size)

    def _whole(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        batch, time = query.shape[0], query.shape[2]
        size = min(self.size, time)
        where = torch.arange(size, device=query.device)[None]
        blocks = (_blocks(x, size) for x in (query, key, value))
        output, _ = call.attend(*blocks, None, where, where)
        return _joined(output, batch, time)

    def _in_pairs(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        """Attend where chunks begin anywhere in a row; each chunk lies in at most two neighbouring
        blocks.
        """
        batch, time, size = query.shape[0], query.shape[2], min(self.size, query.shape[2])
        where = (call.query_positions % self.size).expand(batch, time)
        runs = chunk_numbers(where, call.documents)
        slots = torch.arange(size, device=query.device)
        their_runs = _block_pairs(runs[:, None, :, None], size, fill=-1)[:, 0, :, 0]
        own_runs = their_runs[:, size:]
        is_earlier = torch.cat([slots - size, slots]) <= slots[:, None]
        mask = (own_runs[:, :, None] == their_runs[:, None]) & is_earlier
        their_places = _block_pairs(where[:, None, :, None], size)[:, 0, :, 0]
        pairs = (_block_pairs(x, size) for x in (key, value))
        output, _ = call.attend(
            _blocks(query, size), *pairs, mask[:, None], their_places[:, size:], their_places
        )
        return _joined(output, batch, time)


def chunk_numbers(where: Tensor, documents: Tensor | None) -> Tensor:
    """Return the chunk numbers [B, T] in rows, for tokens' positions [B, T]."""
    starts = where == 0  # Each token of leading padding is a chunk of its own.
    if documents is not None:
        starts[:, 1:] |= documents.diff(dim=1) != 0
    return starts.cumsum(dim=1)


def _split_blocks(x: Tensor, size: int, fill: int = 0) -> Tensor:
    """Split [B, heads, T, D] into n padded blocks, [B, n, heads, b, D]."""
    missing = -x.shape[2] % size
    return F.pad(x, (0, 0, 0, missing), value=fill).unflatten(2, (-1, size)).transpose(1, 2)


def _blocks(x: Tensor, size: int) -> Tensor:
    return _split_blocks(x, size).flatten(0, 1)


def _block_pairs(x: Tensor, size: int, fill: int = 0) -> Tensor:
    """Return each block joined to the one before it, [B n, heads, 2 b, D]."""
    own = _split_blocks(x, size, fill)
    earlier = F.pad(own, (0, 0, 0, 0, 0, 0, 1, 0), value=fill)[:, :-1]
    return torch.cat([earlier, own], dim=3).flatten(0, 1)


def _joined(output: Tensor, batch: int, time: int) -> Tensor:
    return output.unflatten(0, (batch, -1)).flatten(1, 2)[:, :time]
