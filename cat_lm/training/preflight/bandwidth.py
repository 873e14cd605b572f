"""The speed of the ranks' collectives."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed

from cat_lm.training.devices import ASSUMED_INTERCONNECT, known_device
from cat_lm.training.distributed import Ranks

_START_BYTES = 2**20
_LARGEST_BYTES = {"cuda": 2**29, "cpu": 2**25}
_SECONDS = 0.1  # what one timed all-reduce may take, about


# The share of what the hardware can send below which a fast network is taken for not used. NCCL's
# own tests reach 0.7 to 0.9 of it; the ways around it (the host's memory within a node, TCP between
# nodes) a few hundredths.
_LEAST_OF_LINK, _LEAST_OF_NETWORK = 0.25, 0.1
# GB/s of a GPU without NVLink, whatever others of its name have: PCIe 5, sixteen lanes.
_PCIE = 64.0
# Bytes a second, of devices that are not listed, and of CPUs: gloo in one machine is near 1e9.
_LEAST_OF_UNKNOWN, _LEAST_OF_CPUS = 1e9, 1e7


def least_bandwidth(device: str, nodes: int, per_node: int) -> float:
    """Bytes a second on the bus that an all-reduce reaches wherever the fast network is used.

    Within a node a quarter of the GPU's link: 112 GB/s of an H100's 450. Between nodes a ring has
    all of a node's ways out: a tenth of 25 GB/s for each GPU, 20 GB/s for nodes of eight.

    Args:
        device: its name, as CUDA gives it; "CPU".
        nodes, per_node: how many, and the fewest ranks of one.
    """
    if device == "CPU":
        return _LEAST_OF_CPUS
    found = known_device(device)
    if found is None:
        return _LEAST_OF_UNKNOWN
    link = min(found.link, _PCIE) if "PCIE" in device.upper() else found.link
    least = _LEAST_OF_LINK * link
    if nodes > 1:
        least = min(least, _LEAST_OF_NETWORK * ASSUMED_INTERCONNECT * per_node)
    return least * 1e9


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
