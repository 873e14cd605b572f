"""The files that a run appends to: metrics.jsonl and train.log."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cat_lm.core.errors import UserError, is_temporary
from cat_lm.core.files import AppendedFile, atomic_write, replace_nonfinite
from cat_lm.core.readers import read_json_lines, short


class RunLog:
    """The log on the terminal and in `train.log`; without a path (on other ranks) a no-op."""

    def __init__(self, path: Path | None) -> None:
        self._file = AppendedFile(path, self.line) if path else None

    @property
    def error(self) -> UserError | None:
        """Return the first error of writing the log, or None."""
        return self._file.error if self._file else None

    def line(self, text: str = "") -> None:
        if self._file is None:
            return
        # tqdm keeps a progress bar below the line intact. A closed terminal is no error.
        with contextlib.suppress(OSError):
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        self._file.write("".join(f"{stamp} {part}\n" for part in text.split("\n")).encode())

    def close(self) -> None:
        if self._file:
            self._file.close()


class Metrics:
    """The records of steps and validations in metrics.jsonl, on rank 0 only.

    A resumed run drops the records after `recorded_step`, its checkpoint's step (0: none), because
    these steps are run again. `validated_step` is the step of the last recorded validation at that
    time (0: none). `say` is called with a line when the file was removed or renamed.
    """

    def __init__(
        self,
        run_folder: Path,
        recorded_step: int,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        path = run_folder / "metrics.jsonl"
        if recorded_step and not path.exists():
            say(f"{path}: is gone, and with it the records of steps 1 to {recorded_step:,}")
        self.validated_step = drop_later_records(path, up_to_step=recorded_step)
        self._file = AppendedFile(path, say)

    @property
    def error(self) -> UserError | None:
        """Return the first error of writing records, or None."""
        return self._file.error

    def write(self, record: dict[str, Any]) -> None:
        """Append a record, which has `step`; numbers that are not finite become null."""
        self._file.write((json.dumps(replace_nonfinite(record)) + "\n").encode())

    def sync(self) -> None:
        """Flush to disk, so that a power cut loses no record of a step before a checkpoint."""
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def write_error(metrics: Metrics | None, log: RunLog) -> UserError | None:
    """Return the error that made the log or the records incomplete, or None; call it on rank 0."""
    return (metrics.error if metrics else None) or log.error


def check_writes(metrics: Metrics | None, log: RunLog, before_saving: bool = False) -> None:
    """Raise UserError if the log or the records are incomplete.

    Args:
        before_saving: If True, ignore transient write errors of `train.log`, so that the checkpoint
            is still saved.
    """
    error = write_error(metrics, log)
    if error is None or (before_saving and error is log.error and is_temporary(error)):
        return
    left = f"its checkpoints are {'as they were' if before_saving else 'whole'}"
    raise type(error)(
        f"{error}; the run ends, {left}: when the file can be written, train.resume=auto goes "
        "on from the newest"
    )


def finite_numbers(record: dict[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a record by name, without its step."""
    held = replace_nonfinite(record).items()
    return {k: v for k, v in held if isinstance(v, int | float) and k != "step"}


def drop_later_records(path: Path, up_to_step: int) -> int:
    """Drop records of later steps; return the step of the last validation that is kept, or 0.

    For a run without a past in this folder (0), the file of an earlier run is renamed, not deleted.
    Raises as `read_records` does.
    """
    if not path.exists():
        return 0
    if up_to_step == 0 and path.stat().st_size:
        aside = (path.with_name(f"metrics.{number}.jsonl") for number in itertools.count(1))
        path.rename(next(name for name in aside if not name.exists()))
        return 0
    kept = [record for record in read_records(path) if record["step"] <= up_to_step]
    with atomic_write(path) as stream:
        stream.writelines(json.dumps(record) + "\n" for record in kept)
    return max((record["step"] for record in kept if "val_loss" in record), default=0)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl, without an incomplete last line.

    Raises UserError if it is not UTF-8, or a line is not the record of a step.
    """
    return read_json_lines(path, _check_record, cut_tail=True)


def _check_record(record: dict[str, Any], place: str) -> None:
    step = record.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise UserError(f"{place}: step is {short(step)}, must be the number of a step")
