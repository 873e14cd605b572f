"""Time the saving of a checkpoint, and how long a run takes to go on from it.

    save     flushed, hashed and compared with memory
    load     verified and read into an engine that is there already
    resume   the same as a run does it: the model is built while large files are verified
    model    the model and its engine alone, for comparison

The files lie in the page cache when they are read; the disk is what saving waits for.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cat_lm.config import RunConfig
from eval.speed.model.build import ModelSize
from eval.speed.model.update import run_values
from eval.speed.progress import rounds, say
from eval.speed.timing import summary

FINGERPRINT = "random"
CONTEXT_LENGTH = 32


def checkpoint_speed(
    size: ModelSize, model: str, zero_stage: int, repeats: int, scratch: Path
) -> dict[str, Any]:
    """Save a model of random weights after one step, and load it, `repeats` times each.

    Args:
        model: one of `choices.own_models`.
    """
    from cat_lm.training import distributed

    config = RunConfig.model_validate(_values(size, model, zero_stage, scratch / "run"))
    (scratch / "tokenizer").mkdir()
    with distributed.start() as ranks:
        calls = Calls(config, ranks, scratch)
        say(f"{calls.parameters:,} parameters")
        calls.save()  # the first write of everything
        seconds: dict[str, list[float]] = {"save": [], "load": [], "model": [], "resume": []}
        for _ in rounds(repeats, "checkpoints"):
            for name, values in seconds.items():
                values.append(_timed(getattr(calls, name)))
    saved = sum(path.stat().st_size for path in calls.folder.rglob("*") if path.is_file())
    return {
        "model": model,
        "parameters": calls.parameters,
        "zero_stage": zero_stage,
        "bytes": saved,
        "seconds": {name: summary(values) for name, values in seconds.items()},
    }


def _values(size: ModelSize, name: str, zero_stage: int, run: Path) -> dict[str, Any]:
    values = run_values(size, name, CONTEXT_LENGTH, 1)
    values["train"] |= {"output_dir": str(run), "zero_stage": zero_stage, "resume": "auto"}
    return values | {"checkpoint": {"keep_last": 1}}


class Calls:
    """Hold the calls that are timed; each is a run's own code."""

    def __init__(self, config: RunConfig, ranks: Any, scratch: Path) -> None:
        from cat_lm.training.checkpoint import Checkpoints

        self.config, self.ranks, self._tokenizer = config, ranks, scratch / "tokenizer"
        self._checkpoints = Checkpoints(scratch / "run", config, ranks)
        self.step = 0
        self.model()
        shape = (1, CONTEXT_LENGTH)
        ids = np.random.default_rng(0).integers(0, config.model.vocab_size, shape)
        self._engine.train_step({"input_ids": ids, "labels": ids}, lr=1e-3)
        self.parameters = sum(tensor.numel() for tensor in self._engine.model.parameters())

    def model(self) -> None:
        from cat_lm.training.engine import Engine, build_model

        self._engine = None
        gc.collect()
        model = build_model(self.config, self.config.model.vocab_size)
        self._engine = Engine(model, self.config, self.ranks)

    def save(self) -> None:
        self.step += 1
        state = {"step": self.step, "tokens": self.step, "data": {"fingerprint": FINGERPRINT}}
        self.folder = self._checkpoints.save(self._engine, state, self._tokenizer)

    def load(self) -> None:
        self._checkpoints.load(self._checkpoints.to_resume(), self._engine, FINGERPRINT)

    def resume(self) -> None:
        folder = self._checkpoints.to_resume()
        self.model()
        self._checkpoints.load(folder, self._engine, FINGERPRINT)


def _timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def checkpoint_lines(record: dict[str, Any]) -> list[str]:
    """The record as lines: seconds, and bytes a second where all bytes are moved."""
    lines = [
        f"{record['model']}, {record['parameters']:,} parameters, ZeRO {record['zero_stage']}, "
        f"{record['bytes'] / 1e6:,.0f} MB"
    ]
    for name, seconds in record["seconds"].items():
        low, high = seconds["quartiles"]
        rate = f", {record['bytes'] / seconds['median'] / 1e9:.2f} GB/s" if name != "model" else ""
        lines.append(f"{name:8}{seconds['median']:7.3f} s ({low:.3f}-{high:.3f}){rate}")
    return lines
