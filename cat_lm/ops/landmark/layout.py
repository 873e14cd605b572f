"""Blocks of keys: which slots of a row each of them holds, in documents and beside padding."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.ops.runtime.documents import document_starts


@dataclass(frozen=True)
class BlockLayout:
    """The places of the blocks of b tokens among S keys, and of T queries.

    Tokens are counted from 0 in every document, padding left out; block c of a document holds its
    tokens c b … (c + 1) b − 1. Only complete blocks are listed. R is 1 where all rows are alike,
    else B; n is the number of blocks of the row that has most.

    Attributes:
        block: b.
        slots: [T], of the queries among the keys.
        positions: [R, T], of the queries in their documents; below 0 at padding.
        documents: [R, T], the queries' documents; None where a row is one document.
        starts: [R, n], the first slot of a block.
        numbers: [R, n], c; −1 where a row has fewer blocks.
        block_documents: [R, n]; None as `documents`.
        tokens: positions and documents of the keys, where the queries are the keys; else None.
        padding: [R, 1], the slots of padding that rows begin with; None where `tokens` says it.
    """

    block: int
    slots: Tensor
    positions: Tensor
    documents: Tensor | None
    starts: Tensor
    numbers: Tensor
    block_documents: Tensor | None
    tokens: tuple[Tensor, Tensor | None] | None = None
    padding: Tensor | None = None

    def key_positions(self, keys: int) -> Tensor:
        """Return the positions of the keys [R, S]; negative at padding."""
        if self.tokens is not None:
            return self.tokens[0]
        return torch.arange(keys, device=self.slots.device) - self.padding

    def blocks_of(self, x: Tensor) -> Tensor:
        """Gather tokens x [B, H, S, D] by block, [B, H, n, b, D].

        What stands for a block that a row has not is any token's.
        """
        if self.documents is None and self.padding is None:  # Blocks are contiguous then.
            count = self.numbers.shape[1]
            return x[:, :, : count * self.block].unflatten(2, (count, self.block))
        is_there = (self.numbers >= 0)[:, :, None]
        return take_slots(x, torch.where(is_there, self.block_slots(), 0))

    def block_slots(self) -> Tensor:
        """Return the slots of each block [R, n, b]; absent blocks have invalid slots."""
        return self.starts[:, :, None] + torch.arange(self.block, device=self.starts.device)

    def key_blocks(self, keys: int) -> Tensor:
        """Return the index in `starts` of each key's block, [R, S]; n for keys of no complete
        block.
        """
        rows, count = self.numbers.shape
        places = torch.arange(count, device=self.slots.device)[None, :, None]
        slots = self.block_slots().masked_fill((self.numbers < 0)[:, :, None], keys)
        found = places.new_full((rows, keys + 1), count)
        return found.scatter(1, slots.flatten(1), places.expand_as(slots).flatten(1))[:, :keys]

    def of_queries(self, part: slice) -> BlockLayout:
        """Return the layout of some of the queries."""
        return replace(
            self,
            slots=self.slots[part],
            positions=self.positions[:, part],
            documents=None if self.documents is None else self.documents[:, part],
        )


def sequence_blocks(
    time: int,
    block: int,
    documents: Tensor | None,
    padding_mask: Tensor | None,
    device: torch.device,
) -> BlockLayout:
    """Return the layout of rows whose queries are also their keys.

    Args:
        documents: [B, T] numbers that change where a document starts and do not come back, as
            `document_runs` gives them; None for one a row.
        padding_mask: [B, T] bool, False at padding, which is never between tokens of a document.
    """
    slots = torch.arange(time, device=device)
    count = time // block
    if documents is None and padding_mask is None:
        numbers = torch.arange(count, device=device)[None]
        tokens = slots[None], None
        return BlockLayout(block, slots, slots[None], None, numbers * block, numbers, None, tokens)
    shape = (documents if padding_mask is None else padding_mask).shape
    documents = slots.new_zeros(shape) if documents is None else documents
    real = torch.ones_like(documents, dtype=torch.bool) if padding_mask is None else padding_mask
    counted = real.cumsum(dim=1)
    before = torch.where(document_starts(documents), counted - real.long(), 0).cummax(dim=1).values
    positions = torch.where(real, counted - 1 - before, -1)
    is_end = real & (positions % block == block - 1)
    place = torch.where(is_end, is_end.cumsum(dim=1) - 1, count)
    ends = slots.new_full((shape[0], count + 1), block - 1)
    ends = ends.scatter(1, place, slots.expand_as(place))[:, :count]
    is_there = torch.arange(count, device=device) < is_end.sum(dim=1, keepdim=True)
    ends = torch.where(is_there, ends, block - 1)
    numbers = torch.where(is_there, positions.gather(1, ends) // block, -1)
    return BlockLayout(
        block,
        slots,
        positions,
        documents,
        ends - block + 1,
        numbers,
        documents.gather(1, ends),
        (positions, documents),
    )


def cached_blocks(past: int, time: int, block: int, padding: Tensor, least: int = 0) -> BlockLayout:
    """Return the layout of rows of one document with queries for the last `time` keys.

    Args:
        padding: [R], the slots of padding that rows begin with, where the queries are.
        least: what of it is known to be in every row; blocks that none has are not listed.
    """
    slots = torch.arange(past, past + time, device=padding.device)
    padding = padding[:, None]
    numbers = torch.arange((past + time - least) // block, device=padding.device)[None]
    starts = padding + numbers * block
    numbers = torch.where(starts + block <= past + time, numbers, -1)
    return BlockLayout(block, slots, slots - padding, None, starts, numbers, None, None, padding)


def take_slots(x: Tensor, slots: Tensor) -> Tensor:
    """Take rows of x [B, H, S, D] at slots [R, …], which are alike for all heads: [B, H, …, D]."""
    batch, heads, keys, width = x.shape
    shape, tokens = slots.shape[1:], x.transpose(1, 2)
    if tokens.is_contiguous():  # Projections give this layout: take all heads of a token at once.
        firsts = keys * torch.arange(batch, device=slots.device)[:, None]
        taken = tokens.flatten(0, 1).index_select(0, (slots.flatten(1) + firsts).flatten())
        return taken.view(batch, *shape, heads, width).movedim(-2, 1)
    if slots.shape[0] == 1:
        return x.index_select(2, slots.flatten()).unflatten(2, shape)
    index = slots.flatten(1)[:, None, :, None].expand(batch, heads, -1, width)
    return x.gather(2, index).unflatten(2, shape)


def interior_padding(padding_mask: Tensor, documents: Tensor | None) -> Tensor:
    """Return where padding stands before a token, after tokens of its document. [B, T] bool."""
    seen = padding_mask.cumsum(dim=1)
    if documents is not None:
        starts = document_starts(documents)
        seen = seen - torch.where(starts, seen - padding_mask.long(), 0).cummax(dim=1).values
    after_padding = F.pad(~padding_mask[:, :-1], (1, 0), value=False)
    return padding_mask & after_padding & (seen > 1)
