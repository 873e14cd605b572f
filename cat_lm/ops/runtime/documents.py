"""Packed documents: which positions of a row belong together, and where each one starts.

A document is a run of equal ids; an id that comes back later starts another document.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_document_ids(document_ids: Tensor, batch: int, time: int) -> None:
    """Check that ids are [batch, time] integers.

    Raises:
        ValueError: they are not.
    """
    if tuple(document_ids.shape) != (batch, time) or document_ids.dtype not in INTEGERS:
        raise ValueError(
            f"document_ids must be {[batch, time]} integers, not {list(document_ids.shape)} "
            f"{document_ids.dtype}"
        )


def document_starts(document_ids: Tensor) -> Tensor:
    """Return True where a document starts: [B, T] integers to [B, T] bool."""
    return F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)


def starts_of_lengths(cu_seqlens: Tensor, batch: int, time: int) -> Tensor:
    """Return where documents start, from cumulative lengths: [N+1] integers to [B, T] bool.

    A row's first token is marked only where a border is; it starts a document all the same.

    Args:
        cu_seqlens: 0, the length of the first document, of the first two, … up to B·T: borders in
            the B rows joined end to end, as flash attention takes them.
        batch, time: B and T.

    Raises:
        ValueError: borders that do not start at 0, decrease, or do not end at B·T. Borders on a GPU
            are not looked at, as that would make the host wait for it, nor are they while
            torch.compile traces.
    """
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2 or cu_seqlens.dtype not in INTEGERS:
        raise ValueError(
            f"cu_seqlens must be [documents + 1] integers, not {list(cu_seqlens.shape)} "
            f"{cu_seqlens.dtype}"
        )
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
        if first != 0 or last != batch * time or bool((cu_seqlens.diff() < 0).any()):
            raise ValueError(
                f"cu_seqlens must rise from 0 to {batch * time} (all tokens of x), "
                f"not from {first} to {last}"
            )
    borders = torch.zeros(batch * time + 1, dtype=torch.bool, device=cu_seqlens.device)
    return borders.index_fill(0, cu_seqlens.long(), True)[:-1].view(batch, time)


def document_borders(document_ids: Tensor) -> Tensor:
    """Return the document starts in the rows joined end to end, and B·T: [N+1] int32.

    Ids on a GPU make the host wait for their number. [B, T] integers.
    """
    starts = document_starts(document_ids).flatten()
    return F.pad(starts.nonzero().flatten(), (0, 1), value=starts.numel()).to(torch.int32)


def document_runs(document_ids: Tensor) -> Tensor:
    """Number the documents of each row 0, 1, 2 … in order: [B, T] integers to [B, T] int64."""
    return document_starts(document_ids).cumsum(dim=1) - 1


def document_positions(document_ids: Tensor) -> Tensor:
    """Return the position of each token in its document, from 0: [B, T] integers to int64."""
    return positions_of_starts(document_starts(document_ids))


def positions_of_starts(starts: Tensor) -> Tensor:
    """Return the position of each token in its document, from 0: starts [B, T] bool to int64."""
    time = torch.arange(starts.shape[1], device=starts.device).expand_as(starts)
    return time - torch.where(starts, time, 0).cummax(dim=1).values
