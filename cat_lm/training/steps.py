"""A step's numbers, which travel to the host behind the step and are read when they are there."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepResult:
    """Hold what a step did: mean loss in nats a scored token, over all ranks and micro-batches.

    `flags` are the sums over all ranks of what each gave to the step; `auxiliary` the mean of the
    layers' own losses, None where they have none.
    """

    loss: float
    grad_norm: float
    skipped: bool
    flags: tuple[float, ...] = ()
    auxiliary: float | None = None


class Moment:
    """Mark when a device comes to where it is made: a GPU behind what it was given before."""

    def __init__(self, device: torch.device) -> None:
        self._event = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        self._seconds = time.perf_counter()

    def wait(self) -> None:
        """Wait until the device has come there."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Moment) -> float:
        """Return the seconds from `earlier` on, by the device's clock, when it has passed both."""
        if self._event is not None:
            return earlier._event.elapsed_time(self._event) / 1e3
        return self._seconds - earlier._seconds


class LaunchedStep:
    """Hold a step that a GPU may still compute; `result` waits for that one and none after it."""

    def __init__(
        self,
        numbers: torch.Tensor,
        applied: bool,
        has_auxiliary: bool = False,
        *,
        started: Moment,
    ) -> None:
        """Begin the numbers' way.

        Args:
            numbers: float64 on the device: scored tokens, gradient norm, loss summed over them,
                the mean of the layers' own losses if they have any, and the flags.
            applied: whether the step was not skipped, as far as the host knows.
            has_auxiliary: whether layers have losses of their own.
            started: before the step's first launch.
        """
        self._has_auxiliary = has_auxiliary
        self._applied, self._numbers, self._started = applied, numbers, started
        if numbers.device.type == "cuda":
            # Out of the stream's order it would be read behind what is launched next.
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
        self._ended = Moment(numbers.device)

    def result(self) -> StepResult:
        """Read the numbers; the one place where the host waits for a step."""
        self._ended.wait()
        items, grad_norm, total_loss, *flags = self._numbers.tolist()
        auxiliary = flags.pop(0) if self._has_auxiliary else None
        skipped = not (self._applied and math.isfinite(grad_norm))
        return StepResult(total_loss / max(items, 1), grad_norm, skipped, tuple(flags), auxiliary)

    def seconds(self, after: LaunchedStep | None = None) -> float:
        """Return the seconds that the step took, from the end of `after`, when it was read.

        The device's: the host reads a step when it has launched the next, and by its clock the
        first step would be two, and the last one next to nothing.
        """
        return self._ended.seconds_since(self._started if after is None else after._ended)
