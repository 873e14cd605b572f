"""The files in RUN/slurm/: the record of a submitted run and the log of its attempts.

attempts.log has a line for every attempt of a run, by which crash loops are recognized. The batch
script writes the same file in bash, because a node may have no Python outside of a container.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from cat_lm.core.errors import UserError
from cat_lm.core.files import write_json
from cat_lm.core.folders import check_output
from cat_lm.core.readers import Record, Versioned, read_json, resolve
from cat_lm.training.checkpoint import MARKER, step_folders
from launch.slurm.options import Options


class RunFolder:
    """The paths of a run that its jobs use.

    Args:
        run: `train.output_dir`.
        slurm: the folder of the jobs' files, by default RUN/slurm.
    """

    def __init__(self, run: Path | str, slurm: Path | None = None) -> None:
        # Resolve links, so that a run has a single name and a single job.
        self.run = resolve(os.path.expanduser(run))
        self.slurm = slurm or self.run / "slurm"
        self.script = self.slurm / "job.sbatch"
        self.config = self.slurm / "config.yaml"
        self.code = self.slurm / "code"
        self.code_record = self.slurm / "code.json"
        self.code_diff = self.slurm / "code.diff"
        self.log = self.slurm / "job.log"
        self.attempts = self.slurm / "attempts.log"
        self.record = self.slurm / "job.json"
        self.checkpoints = self.run / "checkpoints"
        self.metrics = self.run / "metrics.jsonl"

    def check_writable(self, named_by: str = "train.output_dir") -> None:
        """Raise UserError if the run's folder cannot be made, or SLURM does not accept its path."""
        # These characters would end #SBATCH lines, or the quotes around a path in them.
        if not str(self.run).isprintable() or any(c in str(self.run) for c in '"\\'):
            raise UserError(
                f"{named_by}={str(self.run)!r}: SLURM takes no path with such characters"
            )
        check_output(self.slurm, named_by)

    def newest_checkpoint(self) -> str:
        """Return the name of the newest checkpoint with a completion marker, or `none`."""
        marked = [step for step in step_folders(self.checkpoints) if (step / MARKER).is_file()]
        return marked[-1].name if marked else "none"

    def begin_attempt(self, job: str, restart: int) -> None:
        self._append(f"{_now()} job={job} restart={restart} checkpoint={self.newest_checkpoint()}")

    def reset_attempts(self, reason: str) -> None:
        """Reset the count of attempts, because a user has submitted the run again."""
        self._append(f"# {_now()} {reason}")

    def attempt_lines(self) -> list[str]:
        """Return all attempts, oldest first."""
        return [line for line in self._lines() if not line.startswith("#")]

    def attempts_without_progress(self) -> int:
        """Return the number of last attempts in a row that began at the newest checkpoint."""
        count, now = 0, self.newest_checkpoint()
        for line in reversed(self._lines()):
            if not line.endswith(f" checkpoint={now}"):
                break
            count += 1
        return count

    def _lines(self) -> list[str]:
        try:
            return self.attempts.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []

    def _append(self, line: str) -> None:
        with open(self.attempts, "a", encoding="utf-8") as stream:
            stream.write(line + "\n")


class Job(Record):
    """A job of the run: its id, and when and how it was submitted."""

    id: str
    time: str
    command: list[str]


class JobRecord(Versioned):
    """The record job.json: how the run was submitted last, and its jobs, the newest last.

    A command of `launch.slurm run` has no configuration.
    """

    config: str | None
    overrides: list[str]
    options: Options
    site: str | None
    jobs: list[Job]

    def write(self, folder: RunFolder) -> None:
        write_json(folder.record, self.model_dump())

    @property
    def job_ids(self) -> list[str]:
        return [job.id for job in self.jobs]

    @property
    def program(self) -> list[str]:
        """The command of `launch.slurm run`, as it was submitted last; empty for a run."""
        words = self.jobs[-1].command if self.config is None else []
        return words[words.index("--") + 1 :] if words else []


def read_record(folder: RunFolder) -> JobRecord:
    """Read job.json.

    Raises:
        UserError: no job was ever submitted for this run, or job.json is damaged.
    """
    if not folder.run.is_dir():
        raise UserError(f"{folder.run}: no such run folder")
    if not os.path.lexists(folder.record):
        raise UserError(
            f"{folder.run}: was never submitted ({folder.record} is missing); "
            "`python -m launch.slurm submit` starts a run"
        )
    return read_json(folder.record, JobRecord, advice="move it away and submit the run again")


def jobs_of(folder: RunFolder) -> list[Job]:
    """Return the jobs that were submitted before for the run; none for a new run."""
    return read_record(folder).jobs if folder.record.is_file() else []


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
