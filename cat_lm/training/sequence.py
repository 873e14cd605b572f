"""Groups of ranks that share sequences (`train.sequence_parallel`)."""

from __future__ import annotations

from datetime import timedelta

import torch

from cat_lm.config import RunConfig
from cat_lm.model.sequence import SequenceGroup
from cat_lm.training.distributed import Ranks, patience


def sequence_group(config: RunConfig, ranks: Ranks) -> SequenceGroup | None:
    """Join the neighbouring ranks that share this one's sequences, a collective; None for P = 1.

    Raises:
        UserError: P does not divide the ranks.
    """
    parts, shares = config.train.sequence_parallel, config.row_shares(ranks.world_size)
    if parts == 1:
        return None
    timeout = timedelta(minutes=patience(config.train.hang_minutes))
    groups = [
        torch.distributed.new_group(range(share * parts, (share + 1) * parts), timeout=timeout)
        for share in range(shares)
    ]
    return SequenceGroup(parts, ranks.rank % parts, groups[ranks.rank // parts])


def describe(config: RunConfig) -> str:
    """Return how ranks share sequences, for the log; "" where each has its own."""
    parts = config.train.sequence_parallel
    if parts == 1:
        return ""
    length = config.data.context_length
    return (
        f"{parts} neighbouring ranks share each, {length // parts:,} of {length:,} tokens a rank; "
        "whole of a rank's heads in between"
    )
