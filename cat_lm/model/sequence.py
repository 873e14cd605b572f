"""Sequence parallelism: the exchanges between ranks that each hold a part of every sequence.

P ranks hold parts of T/P tokens, in their order. What mixes tokens is reached in one of two ways:

- `to_heads`: an all-to-all after which a rank has whole sequences of 1/P of the heads, and
  `to_tokens`, the one back (Jacobs et al., DeepSpeed-Ulysses, arXiv:2309.14509); here before the
  convolution, so that filters, rotation, documents and recurrences read whole sequences.
- `with_halo`: the last n tokens of the part before, where a short convolution mixes heads or
  belongs to none.

Gradients take the same way back. Modules ask the `SequenceGroup` of their context, which
`CausalLanguageModel.set_sequence_group` gave the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class SequenceGroup:
    """P ranks that share every sequence of their batch.

    Attributes:
        size: P.
        rank: rank of this process in the group; it holds tokens rank·T/P … (rank + 1)·T/P − 1.
        group: torch.distributed's.
    """

    size: int
    rank: int
    group: Any

    def to_heads(self, *streams: Tensor) -> tuple[Tensor, ...]:
        """Exchange parts of all heads, [B, T/P, n, …], for whole sequences of own heads, [B, T,
        n/P, …].

        The third dimension counts heads, or channels head by head. Streams have one dtype.
        """
        shapes = [(x.shape[2] // self.size, *x.shape[3:]) for x in streams]
        batch, time = streams[0].shape[:2]
        # [B, T/P, P, the channels of a rank's heads]
        apart = [x.unflatten(2, (self.size, -1)).flatten(3) for x in streams]
        sent = apart[0] if len(apart) == 1 else torch.cat(apart, dim=3)
        received = self._swap(sent.movedim(2, 0)).transpose(0, 1)  # [B, P, T/P, channels]
        found = received.reshape(batch, self.size * time, -1)
        parts = found.split([x.shape[3] for x in apart], dim=2)
        return tuple(part.unflatten(2, shape) for part, shape in zip(parts, shapes, strict=True))

    def to_tokens(self, x: Tensor) -> Tensor:
        """Exchange whole sequences of own heads, [B, T, n/P, …], for parts of all heads, [B, T/P,
        n, …].
        """
        sent = x.unflatten(1, (self.size, -1)).transpose(0, 1)  # [P, B, T/P, n/P, …]
        return self._swap(sent).movedim(0, 2).flatten(2, 3)

    def to_sequence(self, x: Tensor) -> Tensor:
        """Gather a tensor without heads on every rank: [B, T/P, …] to [B, T, …]."""
        received = self._swap(x.expand(self.size, *x.shape))
        return received.transpose(0, 1).flatten(1, 2)

    def with_halo(self, count: int, *streams: Tensor) -> tuple[Tensor, ...]:
        """Return the `count` tokens before this part, zeros at the beginning, and the part.

        [B, T/P, …] to [B, count + T/P, …], for streams of one dtype.
        """
        if count == 0:
            return streams
        flat = [x.flatten(2) for x in streams]
        sent = torch.cat([x[:, -count:] for x in flat], dim=2)
        before = self._before(sent).split([x.shape[2] for x in flat], dim=2)
        return tuple(
            torch.cat([halo.unflatten(2, x.shape[2:]), x], dim=1)
            for halo, x in zip(before, streams, strict=True)
        )

    def part(self, x: Tensor | None, before: int = 0) -> Tensor | None:
        """Return this rank's part of a whole sequence [B, T, …], with a halo; None for None."""
        if x is None:
            return None
        span = self.span(x.shape[1])
        cut = x[:, max(0, span.start - before) : span.stop]
        missing = max(0, before - span.start)
        return F.pad(cut, (*[0, 0] * (x.ndim - 2), missing, 0)) if missing else cut

    def is_real(self, before: int, like: Tensor) -> Tensor | None:
        """Return which tokens of `like` [B, before + T/P, …] exist, bool; None if all do."""
        missing = before - self.rank * (like.shape[1] - before)
        if missing <= 0:
            return None
        places = torch.arange(like.shape[1], device=like.device)
        return (places >= missing).expand(len(like), -1)

    def span(self, count: int) -> slice:
        """Return this rank's slice of `count` tokens or heads."""
        share = count // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def slice_own(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return the slice of a tensor of all heads that belongs to this rank's heads."""
        return x[(*[slice(None)] * dim, self.span(x.shape[dim]))]

    def whole_like(self, x: Tensor) -> Tensor:
        """Return an empty tensor of shape [B, T, …] for x [B, T/P, …]."""
        return x.new_empty(()).expand(x.shape[0], self.size * x.shape[1], *x.shape[2:])

    def _swap(self, x: Tensor) -> Tensor:
        """Send x[r] to rank r, and return the tensors received, by sender. [P, …]"""
        share = [1] * self.size
        return _Exchange.apply(x, share, share, self.group)

    def _before(self, last: Tensor) -> Tensor:
        """Send the last tokens [B, n, …] to the next rank; return the previous one's, or zeros."""
        rows = len(last)
        sent, received = [0] * self.size, [0] * self.size
        if self.rank + 1 < self.size:
            sent[self.rank + 1] = rows
        if self.rank > 0:
            received[self.rank - 1] = rows
        # The last rank sends nothing, and the first gets nothing.
        found = _Exchange.apply(last[: sum(sent)], sent, received, self.group)
        return found if self.rank > 0 else torch.cat([found, torch.zeros_like(last)])


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows; gradients go back to where the rows came from."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: Sequence[int], received: Sequence[int], group: Any
    ) -> Tensor:
        ctx.way = received, sent, group
        return _exchange_rows(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(gradient, *ctx.way), None, None, None


def _exchange_rows(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    """Send the next `sent[r]` rows to rank r, and return the `received[r]` rows from each, in
    order.
    """
    x = x.contiguous()  # A gradient may have any strides.
    found = x.new_empty(sum(received), *x.shape[1:])
    torch.distributed.all_to_all_single(found, x, list(received), list(sent), group=group)
    return found


# Without a group, the functions below return their inputs unchanged.


def to_heads(group: SequenceGroup | None, *streams: Tensor) -> tuple[Tensor, ...]:
    return streams if group is None else group.to_heads(*streams)


def to_tokens(group: SequenceGroup | None, x: Tensor) -> Tensor:
    return x if group is None else group.to_tokens(x)


def to_sequence(group: SequenceGroup | None, x: Tensor) -> Tensor:
    return x if group is None else group.to_sequence(x)


def own_heads(group: SequenceGroup | None, x: Tensor, dim: int = 0) -> Tensor:
    return x if group is None else group.slice_own(x, dim)


def check_divided(group: SequenceGroup | None, *others: Any) -> None:
    if group is not None and any(other is not None for other in others):
        raise ValueError(
            "a model whose sequences are divided among ranks takes document_ids, and neither "
            "padding nor a cache"
        )
