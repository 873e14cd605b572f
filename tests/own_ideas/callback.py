"""A callback of one's own: `train.callbacks: {slow_steps: {factor: 3}}`.

It logs each step that takes `factor` times as long as the mean of those before, and records how
many there were. The mean is saved in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cat_lm.callbacks import Callback, CallbackKind, Run, register


@dataclass(frozen=True)
class Options:
    """What `train.callbacks` can give."""

    factor: float = 2.0

    def __post_init__(self) -> None:
        if self.factor <= 1:
            raise ValueError(f"factor={self.factor}: must be above 1")


class SlowSteps(CallbackKind):
    """What there is to know before a run."""

    name = "slow_steps"
    Options = Options
    ranks = "first"

    def build(self, options: Options, run: Run) -> Callback:
        return Listener(options.factor, run)


class Listener(Callback):
    """Of one run."""

    def __init__(self, factor: float, run: Run) -> None:
        self.factor, self.run = factor, run
        self.steps = self.slow = 0
        self.mean = 0.0

    def record(self, record: dict[str, Any]) -> None:
        if "step_seconds" not in record:
            return
        seconds, self.steps = record["step_seconds"], self.steps + 1
        if self.steps > 1 and seconds > self.factor * self.mean:
            self.slow += 1
            self.run.log(f"step {record['step']}: slow, {seconds:.2f} s")
        self.mean += (seconds - self.mean) / self.steps

    def validation(self, step: int, results: dict[str, float]) -> None:
        results["steps/slow"] = self.slow

    def state(self) -> Mapping[str, Any]:
        return {"steps": self.steps, "slow": self.slow, "mean": self.mean}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.steps, self.slow, self.mean = (state[key] for key in ("steps", "slow", "mean"))


register(SlowSteps())
