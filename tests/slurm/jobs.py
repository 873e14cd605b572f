"""A run on the test cluster as a test sees it: its commands, its state, its ranks' processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.conftest import REPOSITORY
from tests.runs import losses, records
from tests.slurm.cluster import Cluster, environments, kill, wait_for

# Generous: on a machine that does other things too, a start of training takes a minute.
START_SECONDS = 180
# What a shell may have. sbatch alone would prefer each to what the script asks for.
OF_A_USER = {"SBATCH_NO_REQUEUE": "", "SBATCH_TIMELIMIT": "1", "SBATCH_OPEN_MODE": "truncate"}


class Job:
    """One run folder and its newest SLURM job."""

    def __init__(self, cluster: Cluster, run: Path, site: Path) -> None:
        self.cluster, self.run, self.site = cluster, run, site

    def launch(self, *arguments: object) -> str:
        """`python -m launch.slurm …`, as a user of the cluster types it; returns what it says."""
        done = subprocess.run(
            [sys.executable, "-m", "launch.slurm", *map(str, arguments)],
            cwd=REPOSITORY,
            env={**self.cluster.environment, **OF_A_USER, "CAT_LM_SITE": str(self.site)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def scontrol(self, *arguments: str) -> str:
        return self.cluster.run("scontrol", *arguments)

    @property
    def id(self) -> str:
        return json.loads((self.run / "slurm/job.json").read_text())["jobs"][-1]["id"]

    @property
    def log(self) -> str:
        path = self.run / "slurm/job.log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def attempts(self) -> list[str]:
        """The lines of attempts.log that are attempts: `… job=7 restart=0 checkpoint=none`."""
        lines = (self.run / "slurm/attempts.log").read_text().splitlines()
        return [line for line in lines if not line.startswith("#")]

    def shown(self) -> dict[str, str]:
        """What SLURM says of the job: JobState, ExitCode, Restarts, …"""
        return dict(re.findall(r"(\w+)=(\S*)", self.scontrol("show", "job", self.id)))

    @property
    def state(self) -> str:
        return self.shown()["JobState"]

    @property
    def losses(self) -> list[tuple]:
        return losses(self.run)

    @property
    def step(self) -> int:
        """The last recorded step."""
        try:
            return max((record["step"] for record in records(self.run)), default=0)
        except (FileNotFoundError, ValueError):  # ValueError: a line is half-written
            return 0

    def ranks(self, restart: int | None = None) -> dict[int, int]:
        """Process id of each rank that lives; of all starts, or of one restart of the job."""
        found = {}
        for process, environment in environments():
            if environment.get("SLURM_JOB_ID") != self.id or "SLURM_STEP_ID" not in environment:
                continue
            if environment["SLURM_CONF"] != self.cluster.environment["SLURM_CONF"]:
                continue
            if restart is not None and environment.get("SLURM_RESTART_COUNT", "0") != str(restart):
                continue
            if _is_python_train(process):
                found[int(environment["SLURM_PROCID"])] = process
        return found

    def signal_ranks(self, number: signal.Signals, *ranks: int) -> None:
        """To these ranks, or to all."""
        processes = self.ranks()
        assert set(processes) >= {0, 1}, f"ranks {sorted(processes)} live\n{self.log}"
        for rank in ranks or processes:
            kill(processes[rank], number)

    def wait_for_step(self, step: int) -> None:
        self._wait(lambda: self.step >= step, f"step {step}", START_SECONDS)

    def wait_for_state(self, *states: str, seconds: float = 60) -> None:
        self._wait(lambda: self.state in states, " or ".join(states), seconds)

    def wait_for_log(self, text: str, seconds: float = START_SECONDS) -> None:
        self._wait(lambda: text in self.log, f"{text!r} in job.log", seconds)

    def wait_until_over(self) -> None:
        """Until the job has ended and is not queued again."""
        # squeue lists queued, running and completing jobs.
        listed = ("squeue", "--noheader", f"--jobs={self.id}")
        self._wait(lambda: not self.cluster.run(*listed).strip(), "end", 3 * START_SECONDS)

    def _wait(self, condition: Callable[[], object], what: str, seconds: float) -> None:
        try:
            wait_for(condition, what, seconds)
        except TimeoutError as error:
            raise AssertionError(f"{error}: job {self.shown()}\n{self.log}") from error


def _is_python_train(process: int) -> bool:
    try:
        arguments = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"python" in os.path.basename(arguments[0]) and b"train.py" in arguments
