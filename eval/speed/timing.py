"""Time a function: warmed up, repeated in turn with its rivals, summed up as quartiles.

On a GPU the clock is a pair of events in the stream. The call is replayed from a CUDA graph where
it can be captured, so that Python's launch overhead, which a model hides behind other work, is not
taken for the kernel's time. Before each timed call the second-level cache is filled with zeros: the
inputs come from memory, and as many unwritten lines stand in the cache before the call as after it,
so that the call pays for the writes that it causes. The card's clocks are left as they are.

On a CPU the clock is the wall's. A short call is repeated until it lasts `min_seconds`; caches stay
as the call before left them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eval.speed.progress import rounds

WARM_UPS = 3
_FLUSH_BYTES = 256 * 2**20  # several times the cache of any GPU so far


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
        """Median, quartiles, extremes and all values, in seconds."""
        return {
            **summary(self.seconds),
            "calls_a_repeat": self.calls_a_repeat,
            "cuda_graph": self.cuda_graph,
            **({"note": self.note} if self.note else {}),
        }


def times_as_fast(seconds: Sequence[float], rival: Sequence[float]) -> dict[str, Any]:
    """Compare times with a rival's: how many times as fast, summed up over the rounds.

    Both stood in every round, so that a slow round slows both sides of its ratio.
    """
    return summary([theirs / own for own, theirs in zip(seconds, rival, strict=True)])


def summary(values: list[float]) -> dict[str, Any]:
    """Median, quartiles (the inclusive method), minimum, maximum, and all values in order."""
    if len(values) > 1:
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    else:
        low = middle = high = values[0]
    return {
        "median": middle,
        "quartiles": [low, high],
        "range": [min(values), max(values)],
        "all": values,
    }


def time_in_turn(
    calls: Mapping[Hashable, Callable[[], Any]],
    device: torch.device,
    repeats: int,
    *,
    min_seconds: float = 0.01,
    cuda_graphs: bool = True,
    flush_cache: bool = True,
    warm_ups: int = WARM_UPS,
    title: str = "timing",
) -> dict[Hashable, Timing]:
    """Times each call `repeats` times, all of them in every round, so that a slow moment of the
    machine falls on all alike.

    Args:
        calls: name to a function without arguments.
        device: where they compute.
        repeats: rounds.
        min_seconds: CPU: a call that is shorter is repeated within a round, and divided.
        cuda_graphs, flush_cache: GPU: see the module.
        warm_ups: calls of each before the first round; compiling and building end there.
        title: of the progress bar.
    """
    if device.type == "cuda":
        return _time_on_gpu(calls, device, repeats, cuda_graphs, flush_cache, warm_ups, title)
    timings = {}
    for name, call in calls.items():
        for _ in range(warm_ups):
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
    cuda_graphs: bool,
    flush_cache: bool,
    warm_ups: int,
    title: str,
) -> dict[Hashable, Timing]:
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device) if flush_cache else None
    timings, replays, events = {}, {}, {}
    for name, call in calls.items():
        for _ in range(warm_ups):
            call()
        torch.cuda.synchronize(device)
        replays[name], timings[name] = call, Timing(cuda_graph=False)
        if cuda_graphs:
            replays[name], timings[name] = _captured(call)
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


def _captured(call: Callable[[], Any]) -> tuple[Callable[[], Any], Timing]:
    """The call as a CUDA graph's replay; the call itself where it cannot be captured."""
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
