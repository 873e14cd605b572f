"""The files in RUN/slurm/, and the record of a submitted run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cat_lm.core.errors import UserError
from cat_lm.core.files import write_json
from cat_lm.core.folders import check_output
from cat_lm.core.readers import Record, Versioned, read_json, resolve
from launch.slurm.options import Options


@dataclass(frozen=True)
class RunFolder:
    """The files of one run that its jobs use; `run` is the absolute `train.output_dir`."""

    run: Path

    @classmethod
    def of(cls, run: Path | str) -> RunFolder:
        # Without links, so that a run has one name, and one job.
        try:
            return cls(resolve(Path(run).expanduser()))
        except RuntimeError as error:  # ~nobody
            raise UserError(f"{run}: {error}") from None

    @property
    def slurm(self) -> Path:
        return self.run / "slurm"

    @property
    def script(self) -> Path:
        return self.slurm / "job.sbatch"

    @property
    def config(self) -> Path:
        return self.slurm / "config.yaml"

    @property
    def code(self) -> Path:
        return self.slurm / "code"

    @property
    def code_record(self) -> Path:
        return self.slurm / "code.json"

    @property
    def code_diff(self) -> Path:
        return self.slurm / "code.diff"

    @property
    def log(self) -> Path:
        return self.slurm / "job.log"

    @property
    def attempts(self) -> Path:
        return self.slurm / "attempts.log"

    @property
    def record(self) -> Path:
        return self.slurm / "job.json"

    @property
    def checkpoints(self) -> Path:
        return self.run / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.run / "metrics.jsonl"

    def check_writable(self) -> None:
        """Raises UserError where no folder can be made, such as for a file in its way."""
        # They would end SLURM's own lines, or the quotes around a path in them.
        if not str(self.run).isprintable() or any(c in str(self.run) for c in '"\\'):
            raise UserError(
                f"train.output_dir={str(self.run)!r}: SLURM takes no path with such characters"
            )
        check_output(self.slurm, "train.output_dir")


class Job(Record):
    """A job that SLURM has had of the run."""

    id: str
    time: str
    command: list[str]


class JobRecord(Versioned):
    """job.json: how the run was submitted last, and its jobs, the newest last."""

    config: str
    overrides: list[str]
    options: Options
    site: str | None
    jobs: list[Job]

    def write(self, folder: RunFolder) -> None:
        write_json(folder.record, self.model_dump())

    @property
    def job_ids(self) -> list[str]:
        return [job.id for job in self.jobs]


def read_record(folder: RunFolder) -> JobRecord:
    """Raises UserError where no job was ever submitted for this run, or job.json is damaged."""
    if not folder.run.is_dir():
        raise UserError(f"{folder.run}: no such run folder")
    if not os.path.lexists(folder.record):
        raise UserError(
            f"{folder.run}: was never submitted ({folder.record} is missing); "
            "`python -m launch.slurm submit` starts a run"
        )
    return read_json(folder.record, JobRecord, advice="move it away and submit the run again")


def earlier_jobs(folder: RunFolder) -> list[Job]:
    """The jobs that this run has had, as far as they are known."""
    return read_record(folder).jobs if folder.record.is_file() else []
