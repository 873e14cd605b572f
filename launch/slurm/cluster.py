"""Call SLURM's commands, and read the states of a run's jobs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cat_lm.core.errors import UserError
from launch.slurm.options import OWN_OPTIONS, sbatch_option

# SBATCH_GPUS_PER_NODE is --gpus-per-node. The variables of these options have other names.
_VARIABLES = {"TIMELIMIT": "time", "MEM_PER_NODE": "mem", "ARRAY_INX": "array"}
# Options that exclude each other in SLURM.
_SAME = (
    {"cpus-per-task", "cpus-per-gpu"},
    {"gres", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task"},
)
_ELSEWHERE = (
    "use a login node of the cluster, or train on this machine: python -m launch.slurm local"
)
_NOBODY = re.compile("configuration source|contact slurm controller|munge|Authentication", re.I)


class NoSlurm(UserError):
    """SLURM is not installed here, or does not answer."""


@dataclass(frozen=True)
class JobState:
    """The state of a job; None or empty for unknown values."""

    id: str | None
    state: str
    reason: str = ""
    nodes: str = ""
    restarts: int | None = None
    exit_code: int | None = None  # as a shell has it


def command(*arguments: str, without: Collection[str] = (), input: str = "") -> str:
    """Run one of SLURM's commands and return its output.

    Args:
        without: environment variables to remove.

    Raises:
        UserError: the command failed; the message has its error output. `NoSlurm` if SLURM is
            missing or does not answer.
    """
    environment = {k: v for k, v in os.environ.items() if k not in without}
    if "SLURM_JOB_ID" in environment:
        # Within a job, the variables of that job's size would apply to the new one.
        kept = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT")
        environment = {
            k: v for k, v in environment.items() if not k.startswith("SLURM_") or k in kept
        }
    given = {"input": input, "env": environment, "timeout": 120, "errors": "replace"}
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, **given)
    except FileNotFoundError:
        raise NoSlurm(
            f"{arguments[0]}: not found: this machine has no SLURM (Debian and Ubuntu: package "
            f"slurm-client); {_ELSEWHERE}"
        ) from None
    except subprocess.TimeoutExpired:
        raise NoSlurm(f"{arguments[0]}: SLURM's controller does not answer; try again") from None
    said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    if done.returncode and _NOBODY.search(said):
        raise NoSlurm(f"{said}; no SLURM answers here: {_ELSEWHERE}")
    if done.returncode:
        raise UserError(f"{arguments[0]}: {said}")
    return done.stdout


def overriding_variables(lines: Iterable[str]) -> list[str]:
    """Return the environment variables that would override these #SBATCH lines.

    Variables of options on which the script relies are included, even if no line has them
    (--error).
    """
    asked = {*OWN_OPTIONS, *map(sbatch_option, lines)}
    asked |= {name for same in _SAME if same & asked for name in same}
    found = ["SLURM_HINT"] if "hint" in asked and "SLURM_HINT" in os.environ else []
    for variable in os.environ:
        name = variable.removeprefix("SBATCH_")
        option = _VARIABLES.get(name, name.lower().replace("_", "-"))
        if name != variable and option in asked:
            found.append(variable)
    return sorted(found)


def _lines_of(script: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", script, re.M)


def check(*scripts: str) -> None:
    """Check that SLURM accepts these scripts; print the variables that `submit` will remove.

    Raises:
        UserError: SLURM refuses a script; the message has its reason.
    """
    without = {script: overriding_variables(_lines_of(script)) for script in scripts}
    if any(without.values()):
        listed = ", ".join(sorted(set().union(*without.values())))
        print(f"left aside, or they would win over what is asked for: {listed}", file=sys.stderr)
    for script in scripts:
        command("sbatch", "--test-only", input=script, without=without[script])


def submit(script: Path, *options: str) -> str:
    """Submit a batch script without the variables that would override it; return the job's id."""
    without = overriding_variables(_lines_of(script.read_text(encoding="utf-8")))
    said = command("sbatch", "--parsable", *options, str(script), without=without)
    # With several clusters, the output is `12;cluster`.
    return said.strip().split(";")[0]


def active_jobs(scripts: Sequence[Path]) -> list[JobState]:
    """Return the user's queued and running jobs of these scripts, also if submitted by hand."""
    jobs = []
    for line in command("squeue", "--me", "--noheader", "--format=%i|%T|%r|%N|%o").splitlines():
        job_id, state, reason, nodes, script = line.split("|", 4)
        # The script's arguments follow its name, if it was submitted with some.
        if any(f"{script} ".startswith(f"{ours} ") for ours in scripts):
            known = job_state(job_id)
            jobs.append(JobState(job_id, state, reason, nodes, known and known.restarts))
    return jobs


def wait_until_over(job_id: str, script: Path) -> JobState | None:
    """Wait until the job has ended and is not queued again; return its record, if SLURM has one."""
    pause = 1
    while True:
        try:
            if all(job.id != job_id for job in active_jobs([script])):
                return job_state(job_id)
        except NoSlurm as error:  # such as a controller that restarts
            print(f"{error}; still waiting for job {job_id}", file=sys.stderr)
        time.sleep(pause)
        pause = min(2 * pause, 30)


def job_state(job_id: str) -> JobState | None:
    """Return a job's state; None if SLURM has no record of it, some minutes after its end."""
    try:
        values = dict(re.findall(r"(\w+)=(\S*)", command("scontrol", "show", "job", job_id)))
    except NoSlurm:
        raise
    except UserError:
        return None
    nodes, restarts = values.get("NodeList", ""), int(values.get("Restarts", "0"))
    state, reason = values.get("JobState", "unknown"), values.get("Reason", "")
    code, number = map(int, values.get("ExitCode", "0:0").split(":"))
    code = 128 + number if number and not code else code
    return JobState(job_id, state, reason, nodes.replace("(null)", ""), restarts, code)
