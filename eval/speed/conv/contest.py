"""Contenders for one piece of work: checked on the tensors to be timed, then timed in turn.

A contender that is wrong or fails is refused: its row says why and holds no time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eval.speed.conv import check
from eval.speed.timing import time_in_turn, times_as_fast

DIRECTIONS = ("forward", "forward_backward")
RIVAL = "conv1d"  # what one would write without this project; its layouts' names begin with it


@dataclass(frozen=True)
class Contender:
    """One way to do the work.

    Attributes:
        name: its row in the table.
        timed: what its time includes, in words.
        results: all outputs and gradients by name, in the layout of the expectation.
        forward: the call timed without, and `forward_backward` with, the backward pass.
    """

    name: str
    timed: str
    results: Callable[[], dict[str, Tensor]]
    forward: Callable[[], Any]
    forward_backward: Callable[[], Any]


@dataclass(frozen=True)
class Rules:
    """Fix how contenders are measured."""

    device: torch.device
    repeats: int
    cuda_graphs: bool
    copy_rate: float  # bytes a second


def hold(
    contenders: Sequence[Contender],
    expected: Mapping[str, Tensor],
    dtype: str,
    floors: Mapping[str, int],
    rules: Rules,
    title: str,
) -> list[dict[str, Any]]:
    """Checks and times the contenders; a row for each.

    Args:
        expected: what `results` must give, in float64.
        dtype: decides the tolerance.
        floors: the fewest bytes each direction can move.
    """
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    for contender in contenders:
        errors, refused = _checked(contender, expected, dtype)
        rows[contender.name] = {
            "kernel": contender.name,
            "timed": contender.timed,
            "errors": errors,
            "refused": refused,
        }
        if refused is None:
            for direction in DIRECTIONS:
                calls[contender.name, direction] = getattr(contender, direction)
    timings = time_in_turn(
        calls, rules.device, rules.repeats, cuda_graphs=rules.cuda_graphs, title=title
    )
    for direction in DIRECTIONS:
        of_it = {name: timing for (name, way), timing in timings.items() if way == direction}
        compared = against_rival({name: timing.seconds for name, timing in of_it.items()})
        for name, timing in of_it.items():
            rate = floors[direction] / timing.median
            rows[name][direction] = {
                "seconds": timing.record(),
                "bytes_per_second": rate,
                "of_copy_bandwidth": rate / rules.copy_rate,
                **compared[name],
            }
    return list(rows.values())


def against_rival(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """Compare every contender with torch's conv1d in the layout that it is fastest in.

    Args:
        seconds: of the rounds, by contender, in one direction.

    Returns:
        By contender: the rival's name, how many times as fast as it (median and range over the
        rounds); all None where it has no time.
    """
    rivals = [name for name in seconds if name.startswith(RIVAL)]
    rival = min(rivals, key=lambda name: statistics.median(seconds[name]), default=None)
    found = {}
    for name, own in seconds.items():
        ratio = times_as_fast(own, seconds[rival]) if rival else {"median": None, "range": None}
        found[name] = {
            "rival": rival,
            "times_as_fast_as_conv1d": ratio["median"],
            "times_as_fast_range": ratio["range"],
        }
    return found


def _checked(
    contender: Contender, expected: Mapping[str, Tensor], dtype: str
) -> tuple[dict[str, dict[str, float]] | None, str | None]:
    """The errors of a contender's results, and why it is refused, or None."""
    # Memory that is handed out again now holds no number: an element that is never written shows.
    for tensor in expected.values():
        torch.full(tensor.shape, float("nan"), dtype=getattr(torch, dtype), device=tensor.device)
    try:
        found = contender.results()
    except (RuntimeError, ValueError, TypeError) as error:
        reason = str(error).strip().splitlines() or ["no message"]
        return None, f"failed with {type(error).__name__}: {reason[0]}"
    errors = {name: check.distances(found[name], expected[name]) for name in expected}
    return errors, check.verdict(errors, dtype)
