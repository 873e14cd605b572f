"""A step's numbers, which travel to the host behind the step and are read when they are there."""

from __future__ import annotations

import math
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


class LaunchedStep:
    """Hold a step that a GPU may still compute; `result` waits for that one and none after it."""

    def __init__(self, numbers: torch.Tensor, applied: bool, has_auxiliary: bool = False) -> None:
        """Begin the numbers' way.

        Args:
            numbers: float64 on the device: scored tokens, gradient norm, loss summed over them,
                the mean of the layers' own losses if they have any, and the flags.
            applied: whether the step was not skipped, as far as the host knows.
            has_auxiliary: whether layers have losses of their own.
        """
        self._has_auxiliary = has_auxiliary
        self._applied, self._numbers, self._arrived = applied, numbers, None
        if numbers.device.type == "cuda":
            # Out of the stream's order it would be read behind what is launched next.
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def result(self) -> StepResult:
        """Read the numbers; the one place where the host waits for a step."""
        if self._arrived is not None:
            self._arrived.synchronize()
        items, grad_norm, total_loss, *flags = self._numbers.tolist()
        auxiliary = flags.pop(0) if self._has_auxiliary else None
        skipped = not (self._applied and math.isfinite(grad_norm))
        return StepResult(total_loss / max(items, 1), grad_norm, skipped, tuple(flags), auxiliary)
