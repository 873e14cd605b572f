"""`python -m tests.gpu.runs WHAT CONFIG … --json FILE`: a run's first steps on this machine.

    doctor   what launch.doctor says of this run
    run      train.py itself, from preflight to the last checkpoint
    repeat   the same run twice, the second gone on with from the checkpoint in its middle, too:
             whether losses and gradient norms are the same bits, which train.deterministic=true
             promises and nothing else does
    profile  a step's kernels by their time, and for how much of it the device worked

Data are the sources of Python's standard library, prepared beside FILE; `profile` draws tokens.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cat_lm.cli import Parser, path
from cat_lm.config import load_config
from cat_lm.errors import UserError, command
from cat_lm.io.files import write_json
from tests.runs import losses, records

REPOSITORY = Path(__file__).resolve().parents[2]
TEXT_BYTES = 8_000_000  # several times what the steps of a session read
WARM_UPS = 2
MOST_KERNELS = 60


def call(*words: object) -> None:
    """Run a command of the project; where it fails it has said why, and this one ends as it did."""
    done = subprocess.run([sys.executable, *map(str, words)], cwd=REPOSITORY, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


def doctor(config: Path, overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    file = folder / "doctor.json"
    of_run = (*overrides, f"train.output_dir={folder / 'run'}")
    call("-m", "launch.doctor", config, *of_run, "--json", file)
    return json.loads(file.read_text(encoding="utf-8"))


def train(config: Path, overrides: Sequence[str], run: Path) -> None:
    call("train.py", config, *overrides, f"train.output_dir={run}", "train.resume=auto")


def first_steps(config: Path, overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """Train; give what the run said and recorded."""
    train(config, overrides, folder / "run")
    log = (folder / "run/train.log").read_text(encoding="utf-8")
    return {"log": log.splitlines(), "metrics": records(folder / "run")}


def repeat(config: Path, overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """Train twice, and once more from the middle; compare what was computed."""
    one, other = folder / "one", folder / "other"
    for run in (one, other):
        train(config, overrides, run)
    whole, last = losses(other), max((other / "checkpoints").glob("step-*"))
    shutil.rmtree(last)
    train(config, overrides, other)
    return {
        "deterministic": load_config(config, overrides).train.deterministic,
        "run_to_run": compared(losses(one), whole),
        "resumed": compared(whole, losses(other)),
    }


def compared(one: Sequence[tuple], other: Sequence[tuple]) -> dict[str, Any]:
    """Say whether rows of (step, numbers …) are equal, and how far they are apart.

    Relative to the first, the largest of all; the step is the first with a difference.
    """
    pairs = [
        (a[0], x, y) for a, b in zip(one, other, strict=True) for x, y in zip(a, b, strict=True)
    ]
    apart = [(step, abs(x - y) / max(abs(x), 1e-12)) for step, x, y in pairs if x != y]
    return {
        "equal": not apart,
        "first_other_step": apart[0][0] if apart else None,
        "largest_relative_difference": max((size for _, size in apart), default=0.0),
    }


def profile(config: Path, overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """Take a step of the run's engine under torch's profiler, whose own time the step has, too."""
    import numpy as np
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    from cat_lm.training import distributed
    from cat_lm.training.engine import Engine, build_model, resolve_precision

    asked = load_config(config, overrides)
    with distributed.start() as ranks:
        asked = asked.with_precision(resolve_precision(asked, ranks.device)[0])
        engine = Engine(build_model(asked, asked.model.vocab_size), asked, ranks)
        shape = asked.train.global_batch_size, asked.data.context_length
        ids = np.random.default_rng(0).integers(0, asked.model.vocab_size, shape)
        batch = {"input_ids": ids, "labels": ids}
        for _ in range(WARM_UPS):
            engine.train_step(batch, lr=0.0)
        on_gpu = ranks.device.type == "cuda"
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
        with torch.profiler.profile(activities=activities) as found:
            start = time.perf_counter()
            engine.train_step(batch, lr=0.0)
            if on_gpu:
                torch.cuda.synchronize(ranks.device)
            seconds = time.perf_counter() - start
    kind, clock = DeviceType.CPU, "self_cpu_time_total"
    if on_gpu:
        kind, clock = DeviceType.CUDA, "self_device_time_total"
    events = [e for e in found.key_averages() if e.device_type == kind and not e.is_user_annotation]
    rows = [{"name": e.key, "count": e.count, "seconds": getattr(e, clock) / 1e6} for e in events]
    rows.sort(key=lambda row: row["seconds"], reverse=True)
    busy = sum(row["seconds"] for row in rows)
    if busy == 0:
        raise UserError(f"profile: torch's profiler recorded nothing of the {ranks.device.type}")
    return {"step_seconds": seconds, "busy_seconds": busy, "kernels": rows[:MOST_KERNELS]}


WHAT = {"doctor": doctor, "run": first_steps, "repeat": repeat, "profile": profile}


def parser() -> argparse.ArgumentParser:
    made = Parser(prog="python -m tests.gpu.runs", description="A run's first steps on a machine.")
    made.add_argument("what", choices=WHAT)
    made.add_argument("config", type=path)
    made.add_argument("overrides", nargs="*", metavar="section.key=value")
    made.add_argument("--json", type=path, required=True, metavar="FILE")
    return made


@command
def main() -> None:
    from eval.common.provenance import provenance

    options = parser().parse_intermixed_args()
    record = options.json.resolve()  # commands run in the repository
    data = record.parent / "data"
    record.parent.mkdir(parents=True, exist_ok=True)
    prepared = ("--source", "python-stdlib", "--tokenizer", "bytes", "--max-bytes", TEXT_BYTES)
    if options.what != "profile":
        call("-m", "data_prep.prepare", *prepared, "--out", data)
    overrides = [*options.overrides, f"data.path={data}"]
    # A new folder: one that was there is not ours, and its run none to go on with. Gigabytes go.
    with tempfile.TemporaryDirectory(prefix=f"{record.stem}-", dir=record.parent) as folder:
        found = WHAT[options.what](options.config, overrides, Path(folder))
    write_json(record, provenance() | found)
    if found.get("deterministic"):
        for name in ("run_to_run", "resumed"):
            if not found[name]["equal"]:
                step = found[name]["first_other_step"]
                raise UserError(f"train.deterministic=true: {name}: step {step} has other bits")


if __name__ == "__main__":
    main()
