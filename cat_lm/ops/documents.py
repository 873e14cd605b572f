"""Packed documents: what a row's document ids say about which positions belong together."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def document_runs(document_ids: Tensor) -> Tensor:
    """Numbers the documents of each row 0, 1, 2 … in order. [B, T] integers to [B, T] int64.

    A document is a run of equal ids; an id that comes back later starts another document.
    """
    starts = document_ids[:, 1:] != document_ids[:, :-1]
    return F.pad(starts, (1, 0)).cumsum(dim=1)


def document_positions(runs: Tensor) -> Tensor:
    """The position of each token in its document, from 0. [B, T] to [B, T] int64."""
    time = torch.arange(runs.shape[1], device=runs.device).expand_as(runs)
    is_start = F.pad(runs[:, 1:] != runs[:, :-1], (1, 0), value=True)
    starts = torch.where(is_start, time, 0).cummax(dim=1).values
    return time - starts
