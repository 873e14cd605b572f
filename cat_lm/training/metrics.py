"""Files of a run while it runs: metrics.jsonl and the log."""

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
    """Lines for people: on the terminal and appended to `train.log`; silent on later ranks."""

    def __init__(self, path: Path | None) -> None:
        self._file = AppendedFile(path, self.line) if path else None

    @property
    def error(self) -> UserError | None:
        """Why a line could not be written, or None."""
        return self._file.error if self._file else None

    def line(self, text: str = "") -> None:
        if self._file is None:
            return
        # Through tqdm, so that a progress bar below is not torn. A closed terminal fails no line.
        with contextlib.suppress(OSError):
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        self._file.write("".join(f"{stamp} {part}\n" for part in text.split("\n")).encode())

    def close(self) -> None:
        if self._file:
            self._file.close()


class Metrics:
    """Records of steps and validations, on the first rank only.

    A resumed run drops the records after its checkpoint, the `recorded_step` (0: none): these
    steps are run again. `validated_step` is that of the last validation that was recorded when the
    run began (0: none); `say` gets a line when the file was removed or renamed.
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
        self.validated_step = keep_records(path, up_to_step=recorded_step)
        self._file = AppendedFile(path, say)

    @property
    def error(self) -> UserError | None:
        """Why a record could not be written, or None."""
        return self._file.error

    def write(self, record: dict[str, Any]) -> None:
        """Append `record`, which holds `step`; a number that is not finite becomes null."""
        self._file.write((json.dumps(replace_nonfinite(record)) + "\n").encode())

    def sync(self) -> None:
        """Flush to disk: what a checkpoint counts as done must not be lost with the machine."""
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def write_error(metrics: Metrics | None, log: RunLog) -> UserError | None:
    """Return why the log or the records are not whole, or None; known on the first rank."""
    return (metrics.error if metrics else None) or log.error


def check_writes(metrics: Metrics | None, log: RunLog, before_saving: bool = False) -> None:
    """Raise UserError where the log or the records are not whole.

    Before saving, lines for people that a passing error has cost are no reason not to.
    """
    error = write_error(metrics, log)
    if error is None or (before_saving and error is log.error and is_temporary(error)):
        return
    left = f"its checkpoints are {'as they were' if before_saving else 'whole'}"
    raise type(error)(
        f"{error}; the run ends, {left}: when the file can be written, train.resume=auto goes "
        "on from the newest"
    )


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a record by name, without its step."""
    held = replace_nonfinite(record).items()
    return {k: v for k, v in held if isinstance(v, int | float) and k != "step"}


def keep_records(path: Path, up_to_step: int) -> int:
    """Drop records of later steps; return the step of the last validation that is kept, or 0.

    A run that has no past here (0) puts the records of an earlier one aside: its checkpoints may
    have been deleted on purpose, its records must not be. Raises as `read_records`.
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
    """Read a metrics.jsonl, without a last line that a kill has cut.

    Raises UserError where it is not UTF-8, or a line is no record of a step.
    """
    return read_json_lines(path, _check_record, cut_tail=True)


def _check_record(record: dict[str, Any], place: str) -> None:
    step = record.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise UserError(f"{place}: step is {short(step)}, must be the number of a step")
