"""Where things lie in RUN/slurm/, and what is remembered there of a submitted run."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cat_lm.errors import UserError
from cat_lm.io.files import write_json
from launch.slurm.options import Options


@dataclass(frozen=True)
class RunFolder:
    """The files of one run that its jobs use; `run` is the absolute `train.output_dir`."""

    run: Path

    @classmethod
    def of(cls, run: Path | str) -> RunFolder:
        # Without links, so that a run has one name, and one job.
        return cls(Path(os.path.realpath(Path(run).expanduser())))

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
        """Raises UserError where a file stands in the way of a folder."""
        for folder in (*reversed(self.slurm.parents), self.slurm):
            if folder.exists() and not folder.is_dir():
                raise UserError(f"train.output_dir={self.run}: {folder} is a file; name another")
        # They would end SLURM's own lines, or the quotes around a path in them.
        if any(character in str(self.run) for character in '\n"\\'):
            raise UserError(
                f"train.output_dir={str(self.run)!r}: SLURM takes no path with such characters"
            )


@dataclass(frozen=True)
class JobRecord:
    """job.json: how the run was submitted last, and its jobs, the newest last."""

    config: str
    overrides: list[str]
    options: Options
    site: str | None
    jobs: list[dict[str, Any]]

    def write(self, folder: RunFolder) -> None:
        write_json(folder.record, asdict(self))

    @property
    def job_ids(self) -> list[str]:
        return [job["id"] for job in self.jobs]


def read_record(folder: RunFolder) -> JobRecord:
    """Raises UserError where no job was ever submitted for this run, or job.json is damaged."""
    if not folder.run.is_dir():
        raise UserError(f"{folder.run}: no such run folder")
    try:
        values = json.loads(folder.record.read_text(encoding="utf-8"))
        return JobRecord(**{**values, "options": Options(**values["options"])})
    except FileNotFoundError:
        raise UserError(
            f"{folder.run}: was never submitted ({folder.record} is missing); "
            "`python -m launch.slurm submit` starts a run"
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{folder.record}: cannot be read: {error}; submit the run again") from None


def earlier_jobs(folder: RunFolder) -> list[dict[str, Any]]:
    """The jobs that this run has had, as far as they are known."""
    return read_record(folder).jobs if folder.record.is_file() else []
