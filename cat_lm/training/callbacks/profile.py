"""Traces of the time and memory of some steps: `train.profile_steps`.

Rank 0 writes `profile/steps-A-B.trace.json.gz` into the run's folder, for
https://ui.perfetto.dev or chrome://tracing, and on a GPU `steps-A-B.memory.pickle`, for
https://pytorch.org/memory_viz.
"""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm.callbacks import Callback, CallbackKind, Run

if TYPE_CHECKING:
    from torch.profiler import profile


class Profile(CallbackKind):
    name = "profile"
    key = "train.profile_steps"
    ranks = "first"

    def build(self, options: Any, run: Run) -> Callback:
        return StepProfile(run)


class StepProfile(Callback):
    """Trace the steps of the configured range that this launch runs."""

    def __init__(self, run: Run) -> None:
        self._run, self._device = run, run.ranks.device
        self._first, self._last = run.config.train.profile_steps
        self._profile: profile | None = None
        self._begun_at = 0

    def launch(self, step: int) -> None:
        self._begin_before(step + 1)

    def step(self, step: int) -> None:
        if self._profile is not None and step == self._last:
            self._finish(step)
        self._begin_before(step + 1)

    def end(self, step: int, exit_code: int) -> None:
        if self._profile is not None:
            self._finish(step)

    def _begin_before(self, step: int) -> None:
        import torch

        if self._profile is not None or not self._first <= step <= self._last:
            return
        self._wait()
        if self._device.type == "cuda":
            torch.cuda.memory._record_memory_history()
        self._profile, self._begun_at = torch.profiler.profile(profile_memory=True), step
        self._profile.start()

    def _finish(self, step: int) -> None:
        import torch

        self._wait()
        self._profile.stop()
        name = f"steps-{self._begun_at}-{step}"
        self._write(f"{name}.trace.json.gz", self._profile.export_chrome_trace)
        if self._device.type == "cuda":
            self._write(f"{name}.memory.pickle", torch.cuda.memory._dump_snapshot)
            torch.cuda.memory._record_memory_history(enabled=None)
        self._profile = None

    def _write(self, name: str, write: Any) -> None:
        folder = self._run.folder / "profile"
        folder.mkdir(exist_ok=True)
        path = _free_name(folder, name)
        temporary = path.with_name(f".{path.name}")  # The profiler compresses by the suffix.
        write(str(temporary))
        os.replace(temporary, path)
        self._run.log(f"profile: {path}")

    def _wait(self) -> None:
        import torch

        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _free_name(folder: Path, name: str) -> Path:
    """Return an unused path for a file, with a number if an earlier launch has written it."""
    stem, dot, ending = name.partition(".")
    names = (f"{stem}{f'-{number}' if number > 1 else ''}{dot}{ending}" for number in count(1))
    return next(path for path in (folder / name for name in names) if not path.exists())


ENTRY = Profile()
