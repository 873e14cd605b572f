"""`status`: show the state of runs, from SLURM and from the runs' files."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from pydantic import FiniteFloat, ValidationError

from cat_lm.core.errors import UserError
from cat_lm.core.outputs import write_result
from cat_lm.core.readers import Record
from launch.slurm import cluster
from launch.slurm.folder import RunFolder, read_record


class Step(Record):
    """The keys of a step's record that `status` reads; records of validations have no loss."""

    step: int
    loss: FiniteFloat | None
    tokens_per_second: FiniteFloat | None = None


def status(arguments: argparse.Namespace) -> None:
    runs = [read_state(RunFolder(run)) for run in arguments.runs]
    is_one = len(runs) == 1
    print(format_state(runs[0]) if is_one else format_table(runs))
    if arguments.json:
        found = runs[0] if is_one else {"runs": runs}
        write_result(arguments.json, "--json", "python -m launch.slurm status", found)


def read_state(folder: RunFolder) -> dict[str, Any]:
    """Return the state of a run as a JSON object, which `status` shows."""
    record = read_record(folder)
    last = record.job_ids[-1] if record.jobs else None
    try:
        active = cluster.active_jobs([folder.script])
        job = active[0] if active else last and cluster.job_state(last)
    except UserError as error:
        # Show the state of the run's files without SLURM.
        job = cluster.JobState(last, "unknown", str(error))
    tried = folder.attempt_lines()
    known = asdict(job or cluster.JobState(last, "unknown"))
    return {
        "run": str(folder.run),
        "job": known.pop("id"),
        **known,
        "command": shlex.join(record.program) if record.program else None,
        "attempts": len(tried),
        "attempts_without_progress": folder.attempts_without_progress(),
        "max_restarts": record.options.max_restarts,
        "last_attempt": tried[-1] if tried else None,
        "checkpoint": folder.newest_checkpoint(),
        **_progress(folder),
        # `local` has no job log.
        "log": str(folder.log if record.jobs else folder.run / "train.log"),
    }


def _progress(folder: RunFolder) -> dict[str, Any]:
    """Return the last complete record of a training step."""
    progress = dict.fromkeys(Step.model_fields)
    with suppress(FileNotFoundError), open(folder.metrics, "rb") as stream:
        # Read only the last records, since a long run has very many.
        stream.seek(max(0, folder.metrics.stat().st_size - 2**16))
        lines = stream.read().decode("utf-8", "replace").splitlines()
        for line in reversed(lines):
            # The first line may be cut, and the last one incomplete.
            with suppress(ValidationError):
                return Step.model_validate_json(line).model_dump()
    return progress


def format_state(found: dict[str, Any]) -> str:
    """Return the lines for one run."""
    state = found["state"].lower()
    if found["job"] is None:
        state = "started by `local`, or never submitted"
    elif found["state"] == "unknown":
        state += f" ({found['reason'] or 'SLURM has forgotten the job; see the end of the log'})"
    elif found["reason"] not in ("", "None"):
        state += f" ({found['reason']})"
    if found["exit_code"]:
        state += f", exit code {found['exit_code']}"
    attempts, stuck = f"{found['attempts']}", found["attempts_without_progress"]
    if found["restarts"]:
        attempts += f", {found['restarts']} restarts of this job"
    if stuck >= found["max_restarts"]:
        attempts += f"; {stuck} in a row from {found['checkpoint']} (gives up at the next)"
    step = "none yet" if found["step"] is None else f"{found['step']}"
    if found["loss"] is not None:
        step += f", loss {found['loss']:.4f}"
    if found["tokens_per_second"] is not None:
        step += f", {found['tokens_per_second']:,.0f} tokens/s"
    rows = {
        "run": found["run"],
        "job": f"{found['job'] or 'none'}: {state}",
        "nodes": found["nodes"] or "none",
    }
    if found["command"]:
        rows["command"] = found["command"]
    else:
        rows |= {"attempts": attempts, "checkpoint": found["checkpoint"], "step": step}
    rows["log"] = found["log"]
    return "\n".join(f"{name:<12}{value}" for name, value in rows.items())


def format_table(runs: Sequence[dict[str, Any]]) -> str:
    """Return a table with a row for each run."""
    names = ("job", "state", "step", "loss", "checkpoint", "attempts", "run")
    rows = [names]
    for found in runs:
        loss = "" if found["loss"] is None else f"{found['loss']:.4f}"
        shown = found | {"loss": loss, "state": found["state"].lower()}
        rows.append(tuple("-" if shown[n] in (None, "") else str(shown[n]) for n in names))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
