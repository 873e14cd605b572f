"""Contenders for one piece of work: checked on the tensors to be timed, then timed in turn.

A contender that is wrong or fails is refused: its row says why and holds no time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eval.speed.conv import check
from eval.speed.timing import time_in_turn, times_as_fast

DIRECTIONS = ("forward", "forward_backward")
RIVAL = "conv1d"  # what one would write without this project


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
    for (name, direction), timing in timings.items():
        rate = floors[direction] / timing.median
        rival = timings.get((RIVAL, direction))
        rows[name][direction] = {
            "seconds": timing.record(),
            "bytes_per_second": rate,
            "of_copy_bandwidth": rate / rules.copy_rate,
            "times_as_fast_as_conv1d": times_as_fast(timing, rival) if rival else None,
        }
    return list(rows.values())


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
