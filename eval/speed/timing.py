"""Time functions on a device: warmed up, repeated in turn with their rivals, as quartiles.

On a GPU the clock is a pair of events in the stream. A call is replayed from a CUDA graph where it
can be captured, so that Python's launch overhead, which a model hides behind other work, is not
taken for the kernel's time. Before each timed call the second-level cache is filled with zeros: the
inputs come from memory, and as many unwritten lines stand in the cache before the call as after it,
so that the call pays for the writes that it causes. The card's clocks are left as they are.

On a CPU the clock is the wall's. A short call is repeated until it lasts `min_seconds`; caches stay
as the call before left them.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from cat_lm.core.errors import UserError
from cat_lm.ops.runtime.cpu import make_process_ready
from cat_lm.pretrained.loading import choose_device

WARM_UPS = 3  # number of calls before timing, which compile and build kernels
_FLUSH_BYTES = 256 * 2**20  # several times as large as the cache of any GPU
# Larger than any cache, so that a copy of it runs at the speed of memory.
_LARGE_COPY_BYTES = {"cuda": 2**30, "cpu": 2**28}
_OPENMP_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND")
_OPENMP_VARIABLES += ("GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def open_device(name: str, threads: int | None) -> torch.device:
    """Return the device named `name`, and make this process ready for it as training does.

    A CPU's tensors keep their memory: the system's clearing of pages would be timed otherwise. What
    is too small for a normal fp32 is 0.

    Raises:
        UserError: the device is absent, or neither a CPU nor a CUDA GPU.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    device = choose_device(name)
    if device.type not in _LARGE_COPY_BYTES:
        raise UserError(f"--device {name}: only CPUs and CUDA GPUs are measured")
    make_process_ready(device)
    return device


def describe(device: torch.device) -> dict[str, Any]:
    """Return the device's name and the settings that decide its speed."""
    settings = {name: os.environ[name] for name in _OPENMP_VARIABLES if name in os.environ}
    found = {"type": device.type, "threads": torch.get_num_threads(), "openmp": settings}
    if device.type != "cuda":
        return {**found, "name": "cpu"}
    properties = torch.cuda.get_device_properties(device)
    try:
        clock = torch.cuda.clock_rate(device)
    except (ImportError, RuntimeError):  # nvidia-ml-py is missing, or the driver refuses.
        clock = None
    return {
        **found,
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_cache_bytes": properties.L2_cache_size,
        "sm_clock_mhz": clock,
        "cuda": torch.version.cuda,
    }


def without_home(text: str) -> str:
    """Return `text` with `~` for this user's home, which does not belong in a record."""
    return text.replace(str(Path.home()), "~")


def log(line: str) -> None:
    """Print what is being done on stderr."""
    print(line, file=sys.stderr, flush=True)


def rounds(count: int, title: str) -> Iterator[int]:
    """Count to `count` under a progress bar, which only a terminal shows."""
    yield from tqdm(range(count), desc=title, disable=None, leave=False, file=sys.stderr)


@dataclass
class Timing:
    """Seconds a call, one for each repeat, and how they were taken."""

    seconds: list[float] = field(default_factory=list)
    calls_a_repeat: int = 1
    cuda_graph: bool | None = None
    note: str | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def record(self) -> dict[str, Any]:
        """Return median, quartiles, extremes and all values, in seconds."""
        how = {"calls_a_repeat": self.calls_a_repeat, "cuda_graph": self.cuda_graph}
        return summary(self.seconds) | how | ({"note": self.note} if self.note else {})


def times_as_fast(seconds: Sequence[float], rival: Sequence[float]) -> dict[str, Any]:
    """Return how many times as fast as a rival, summed up over the rounds.

    Both stood in every round, so that a slow round slows both sides of its ratio.
    """
    return summary([theirs / own for own, theirs in zip(seconds, rival, strict=True)])


def summary(values: list[float]) -> dict[str, Any]:
    """Return median, quartiles (inclusive method), extremes and all values in order."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    ends = [min(values), max(values)]
    return {"median": middle, "quartiles": [low, high], "range": ends, "all": values}


def time_in_turn(
    calls: Mapping[Hashable, Callable[[], Any]],
    device: torch.device,
    repeats: int,
    *,
    min_seconds: float = 0.01,
    alone: bool = True,
    title: str = "timing",
) -> dict[Hashable, Timing]:
    """Time each call `repeats` times, all of them in every round.

    So a slow moment of the machine falls on all alike.

    Args:
        calls: name to a function without arguments.
        device: where they compute.
        repeats: rounds.
        min_seconds: CPU: a call that is shorter is repeated within a round, and divided.
        alone: GPU: replay graphs and flush the cache, for kernels; steps of models need neither.
        title: the title of the progress bar.
    """
    if device.type == "cuda":
        return _time_on_gpu(calls, device, repeats, alone, title)
    timings = {}
    for name, call in calls.items():
        for _ in range(WARM_UPS):
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
        timings[name] = Timing(calls_a_repeat=max(1, math.ceil(min_seconds / max(seconds, 1e-7))))
    for _ in rounds(repeats, title):
        for name, call in calls.items():
            count = timings[name].calls_a_repeat
            start = time.perf_counter()
            for _ in range(count):
                call()
            timings[name].seconds.append((time.perf_counter() - start) / count)
    return timings


def _time_on_gpu(
    calls: Mapping[Hashable, Callable[[], Any]],
    device: torch.device,
    repeats: int,
    alone: bool,
    title: str,
) -> dict[Hashable, Timing]:
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device) if alone else None
    timings, replays, events = {}, {}, {}
    for name, call in calls.items():
        for _ in range(WARM_UPS):
            call()
        torch.cuda.synchronize(device)
        replays[name], timings[name] = (
            _capture_graph(call) if alone else (call, Timing(cuda_graph=False))
        )
        events[name] = []
    for _ in rounds(repeats, title):
        for name, replay in replays.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if flush is not None:
                flush.zero_()
            start.record()
            replay()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize(device)
    for name, pairs in events.items():
        timings[name].seconds = [start.elapsed_time(end) / 1e3 for start, end in pairs]
    return timings


def _capture_graph(call: Callable[[], Any]) -> tuple[Callable[[], Any], Timing]:
    """Return the replay of the call's CUDA graph, or the call where it cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError as error:
        torch.cuda.synchronize()
        reason = str(error).strip().splitlines()[0]
        return call, Timing(cuda_graph=False, note=f"not captured in a CUDA graph: {reason}")
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay, Timing(cuda_graph=True)


def copy_bandwidth(device: torch.device, sizes: list[int], repeats: int) -> dict[int, float]:
    """Time copies of tensors: bytes of a tensor to bytes a second, read and written.

    Measured for the sizes given and one larger than any cache. A tensor's own size is the fair
    ceiling where a cache holds it, the large one's where that is faster.
    """
    calls = {}
    for size in sorted({*sizes, _LARGE_COPY_BYTES[device.type]}):
        source = torch.empty(size, dtype=torch.uint8, device=device).random_()
        calls[size] = partial(torch.empty_like(source).copy_, source)
    timings = time_in_turn(calls, device, repeats, title="copy")
    return {size: 2 * size / timing.median for size, timing in timings.items()}
