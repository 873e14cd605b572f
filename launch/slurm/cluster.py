"""SLURM's own commands, and what they say about a run's jobs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from cat_lm.core.errors import UserError
from launch.slurm import sbatch
from launch.slurm.folder import RunFolder


class NoSlurm(UserError):
    """There is no SLURM here, or none that answers."""


@dataclass(frozen=True)
class JobState:
    """A job as SLURM knows it; None or empty where it does not say."""

    id: str
    state: str
    reason: str = ""
    nodes: str = ""
    restarts: int | None = None


_ELSEWHERE = (
    "use a login node of the cluster, or train on this machine: python -m launch.slurm local"
)
_NOBODY = re.compile("configuration source|contact slurm controller|munge|Authentication", re.I)


def command(*arguments: str, without: Collection[str] = ()) -> str:
    """Runs one of SLURM's commands and returns its output.

    Args:
        without: variables that it does not get to see.

    Raises:
        UserError: the command failed, with what it said; `NoSlurm` where it has nobody to ask.
    """
    done = _run(*arguments, without=without)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        if _NOBODY.search(said):
            last = done.stderr.strip().splitlines()[-1]
            raise NoSlurm(f"{last}; no SLURM answers here: {_ELSEWHERE}")
        raise UserError(f"{arguments[0]}: {said}")
    return done.stdout


def check(*scripts: str) -> None:
    """Raises UserError where SLURM would not take these scripts, with its reason.

    Says on stderr which variables `submit` will keep from sbatch.
    """
    without = {script: sbatch.overriding(sbatch.lines_of(script)) for script in scripts}
    if any(without.values()):
        listed = ", ".join(sorted(set().union(*without.values())))
        print(f"left aside, or they would win over what is asked for: {listed}", file=sys.stderr)
    for script in scripts:
        done = _run("sbatch", "--test-only", input=script, without=without[script])
        if done.returncode:
            raise UserError(f"sbatch: {' '.join(done.stderr.split()) or 'refuses the job'}")


def submit(script: Path, *options: str) -> str:
    """Submits a batch script, without the variables that would win over it; the job's id."""
    without = sbatch.overriding(sbatch.lines_of(script.read_text(encoding="utf-8")))
    said = command("sbatch", "--parsable", *options, str(script), without=without)
    # `12;cluster` where there are several clusters.
    return said.strip().split(";")[0]


def cancel(job_id: str) -> None:
    command("scancel", job_id)


def active_jobs(scripts: list[Path]) -> list[JobState]:
    """The user's queued and running jobs of these batch scripts, also those submitted by hand."""
    lines = command("squeue", "--me", "--noheader", "--format=%i|%T|%r|%N|%o").splitlines()
    jobs = []
    for line in lines:
        job_id, state, reason, nodes, script = line.split("|", 4)
        # Followed by the script's arguments, where somebody gave it some.
        if any(f"{script} ".startswith(f"{ours} ") for ours in scripts):
            restarts = job_state(job_id)
            jobs.append(JobState(job_id, state, reason, nodes, restarts and restarts.restarts))
    return jobs


def active_job(folder: RunFolder) -> JobState | None:
    """The queued or running job of a run, if there is one."""
    jobs = active_jobs([folder.script])
    return jobs[0] if jobs else None


def job_state(job_id: str) -> JobState | None:
    """Ask SLURM for a job's record, also of one that has ended; None where it has none."""
    shown = _run("scontrol", "show", "job", job_id)
    if shown.returncode == 0:
        values = dict(re.findall(r"(\w+)=(\S*)", shown.stdout))
        return JobState(
            job_id,
            values.get("JobState", "unknown"),
            values.get("Reason", ""),
            values.get("NodeList", "").replace("(null)", ""),
            int(values.get("Restarts", "0")),
        )
    # The controller forgets a job minutes after its end; the accounting, where there is one, never.
    if shutil.which("sacct"):
        listed = _run("sacct", "-n", "-P", "-X", "-j", job_id, "-o", "State,NodeList")
        lines = [line for line in listed.stdout.splitlines() if line.strip()]
        if listed.returncode == 0 and lines:
            state, nodes = lines[-1].split("|")[:2]
            return JobState(job_id, state, nodes=nodes.replace("None assigned", ""))
    return None


def _run(
    *arguments: str, input: str = "", without: Collection[str] = ()
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            arguments,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=120,
            env={k: v for k, v in _environment().items() if k not in without},
            input=input,
        )
    except FileNotFoundError:
        raise NoSlurm(
            f"{arguments[0]}: not found: this machine has no SLURM (Debian and Ubuntu: package "
            f"slurm-client); {_ELSEWHERE}"
        ) from None
    except subprocess.TimeoutExpired:
        raise NoSlurm(f"{arguments[0]}: SLURM's controller does not answer; try again") from None


def _environment() -> dict[str, str]:
    """Inside of another job, that job's own sizes must not become the new one's."""
    keep = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT")
    if "SLURM_JOB_ID" not in os.environ:
        return dict(os.environ)
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLURM_") or name in keep
    }
