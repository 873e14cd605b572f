"""`status`: where a run stands, from SLURM and from the run's own files."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat, ValidationError

from cat_lm.core.errors import UserError
from cat_lm.core.outputs import write_result
from cat_lm.core.readers import Record
from launch.slurm import cluster
from launch.slurm.folder import RunFolder, read_record

# Enough for the last few records; a long run has very many.
_TAIL = 64 * 2**10


def status(arguments: argparse.Namespace) -> None:
    found = look(RunFolder(arguments.run))
    print(describe(found))
    if arguments.json:
        write_result(arguments.json, "--json", "python -m launch.slurm status", found)


def look(folder: RunFolder) -> dict[str, Any]:
    """Everything that `status` shows, as JSON."""
    record = read_record(folder)
    job = _job(folder, record.job_ids)
    tried = folder.attempt_lines()
    return {
        "run": str(folder.run),
        "job": job.id if job else (record.job_ids or [None])[-1],
        "state": job.state if job else "unknown",
        "reason": job.reason if job else "",
        "nodes": job.nodes if job else "",
        "restarts": job.restarts if job else None,
        "attempts": len(tried),
        "attempts_without_progress": folder.attempts_without_progress(),
        "max_restarts": record.options.max_restarts,
        "last_attempt": tried[-1] if tried else None,
        "checkpoint": folder.newest_checkpoint(),
        **_progress(folder.metrics),
        # `local` writes to the terminal.
        "log": str(folder.log if record.jobs else folder.run / "train.log"),
    }


def describe(found: dict[str, Any]) -> str:
    state = found["state"].lower()
    if found["job"] is None:
        state = "started by `local`, or never submitted"
    elif found["state"] == "unknown":
        why = found["reason"] or "SLURM has forgotten the job; the log's end tells"
        state = f"unknown ({why})"
    elif found["reason"] not in ("", "None"):
        state += f" ({found['reason']})"
    rows = [
        ("run", found["run"]),
        ("job", f"{found['job']}: {state}"),
        ("nodes", found["nodes"] or "none"),
        ("attempts", _attempts(found)),
        ("checkpoint", found["checkpoint"]),
        ("step", _step(found)),
        ("log", found["log"]),
    ]
    return "\n".join(f"{name:<12}{value}" for name, value in rows)


def _attempts(found: dict[str, Any]) -> str:
    text = f"{found['attempts']}"
    if found["restarts"]:
        text += f", {found['restarts']} restarts of this job"
    stuck = found["attempts_without_progress"]
    if stuck >= found["max_restarts"]:
        text += f"; {stuck} in a row from {found['checkpoint']} (gives up at the next)"
    return text


def _step(found: dict[str, Any]) -> str:
    if found["step"] is None:
        return "none yet"
    text = f"{found['step']}"
    if found["loss"] is not None:
        text += f", loss {found['loss']:.4f}"
    if found["tokens_per_second"] is not None:
        text += f", {found['tokens_per_second']:,.0f} tokens/s"
    return text


def _job(folder: RunFolder, job_ids: list[str]) -> cluster.JobState | None:
    try:
        return cluster.active_job(folder) or (cluster.job_state(job_ids[-1]) if job_ids else None)
    except UserError as error:
        # The run's own files still tell where it stands.
        return cluster.JobState((job_ids or ["none"])[-1], "unknown", str(error))


class _Step(Record):
    """The keys that `status` reads of a step's record; validations have no loss."""

    step: int
    loss: FiniteFloat | None
    tokens_per_second: FiniteFloat | None = None


def _progress(metrics: Path) -> dict[str, Any]:
    """The last complete record of a training step."""
    progress = dict.fromkeys(_Step.model_fields)
    try:
        with open(metrics, "rb") as stream:
            stream.seek(max(0, metrics.stat().st_size - _TAIL))
            lines = stream.read().decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return progress
    for line in reversed(lines):
        # The first line may be cut, the last one half-written.
        with suppress(ValidationError):
            return _Step.model_validate_json(line).model_dump()
    return progress
