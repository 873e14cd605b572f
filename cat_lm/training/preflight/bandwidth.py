"""The speed of the ranks' collectives."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed

from cat_lm.training.distributed import Ranks

_START_BYTES = 2**20
_LARGEST_BYTES = {"cuda": 2**29, "cpu": 2**25}
_SECONDS = 0.1  # what one timed all-reduce may take, about


@dataclass(frozen=True)
class Transport:
    """An all-reduce among all ranks.

    Attributes:
        bytes_: of the tensor on each rank.
        seconds: of the slowest rank, the better of two.
    """

    bytes_: int
    seconds: float
    world_size: int

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second that a rank sends in a ring: 2 (n − 1) / n of the tensor."""
        return 2 * (self.world_size - 1) / self.world_size * self.bytes_ / self.seconds


def measure(ranks: Ranks) -> Transport | None:
    """Times an all-reduce (a collective); None for one rank. Takes some tenths of a second."""
    if ranks.world_size == 1:
        return None
    buffer = torch.zeros(_START_BYTES // 4, device=ranks.device)
    _seconds(buffer, ranks)  # the first one also makes the connections
    seconds = ranks.maximum(_seconds(buffer, ranks))
    size = min(_LARGEST_BYTES[ranks.device.type], int(_START_BYTES * _SECONDS / seconds))
    if size > _START_BYTES:
        buffer = torch.zeros(size // 4, device=ranks.device)
        seconds = ranks.maximum(min(_seconds(buffer, ranks) for _ in range(2)))
    result = Transport(buffer.numel() * 4, seconds, ranks.world_size)
    del buffer
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def _seconds(buffer: torch.Tensor, ranks: Ranks) -> float:
    ranks.barrier()
    start = time.perf_counter()
    torch.distributed.all_reduce(buffer)
    if buffer.device.type == "cuda":
        torch.cuda.synchronize(buffer.device)
    return max(time.perf_counter() - start, 1e-6)
