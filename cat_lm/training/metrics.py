"""Files of a run while it runs: metrics.jsonl, TensorBoard, Weights & Biases, the log."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cat_lm.config import RunConfig
from cat_lm.core.errors import UserError
from cat_lm.core.files import AppendedFile, atomic_write, finite, write_text
from cat_lm.core.readers import read_json_lines, short

_event_files = itertools.count()


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
    run began (0: none); `say` gets a line when a file of the records was removed or renamed.
    """

    def __init__(
        self,
        run_folder: Path,
        config: RunConfig,
        recorded_step: int,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        path = run_folder / "metrics.jsonl"
        if recorded_step and not path.exists():
            say(f"{path}: is gone, and with it the records of steps 1 to {recorded_step:,}")
        self.validated_step = keep_records(path, up_to_step=recorded_step)
        self._file = AppendedFile(path, say)
        self._tensorboard = self._wandb = None
        if config.logging.tensorboard:
            self._tensorboard = EventFile(
                run_folder / "tensorboard", purge_step=recorded_step + 1, say=say
            )
        if config.logging.wandb_project:
            self._wandb = _start_wandb(run_folder, config)

    @property
    def error(self) -> UserError | None:
        """Why a record could not be written, or None."""
        return self._file.error or (self._tensorboard.error if self._tensorboard else None)

    def write(self, record: dict[str, Any]) -> None:
        """Appends `record`, which holds `step`; a number that is not finite becomes null."""
        record = finite(record)
        self._file.write((json.dumps(record) + "\n").encode())
        numbers = {k: v for k, v in record.items() if isinstance(v, int | float) and k != "step"}
        if self._tensorboard:
            self._tensorboard.add(record["step"], {_group(k): v for k, v in numbers.items()})
        if self._wandb:
            self._wandb.log(numbers, step=record["step"])

    def sync(self) -> None:
        """Flushes to disk: what a checkpoint counts as done must not be lost with the machine."""
        self._file.sync()

    def close(self) -> None:
        self._file.close()
        if self._tensorboard:
            self._tensorboard.close()
        if self._wandb:
            self._wandb.finish()


class EventFile:
    """A file of scalars for TensorBoard, which hides older ones in `folder` from `purge_step` on.

    It is written in the caller's thread: the writers of torch and tensorboard have one of their
    own, which a full disk ends with a traceback, and whoever hands it another event may wait for
    ever. A write that fails is kept as `error`, as `AppendedFile` does.
    """

    def __init__(
        self, folder: Path, purge_step: int, say: Callable[[str], object] = lambda line: None
    ) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        name = f"{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_event_files)}"
        self._file = AppendedFile(folder / f"events.out.tfevents.{name}", say)
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2", step=purge_step)
        session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(session_log=session, step=purge_step)

    @property
    def error(self) -> UserError | None:
        return self._file.error

    def add(self, step: int, scalars: dict[str, float]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=x) for tag, x in scalars.items()]
        self._write(summary=self._summary(value=values), step=step)

    def close(self) -> None:
        self._file.close()

    def _write(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())


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


def _group(name: str) -> str:
    return f"validation/{name}" if name.startswith("val_") else f"train/{name}"


def _start_wandb(run_folder: Path, config: RunConfig) -> Any:
    try:
        import wandb
    except ImportError:
        raise UserError(
            f"logging.wandb_project={config.logging.wandb_project}: wandb is not installed; "
            "pip install 'cat_lm[wandb]'"
        ) from None
    identity = run_folder / "wandb_id"
    if not identity.exists():
        write_text(identity, uuid.uuid4().hex)
    return wandb.init(
        project=config.logging.wandb_project,
        name=run_folder.name,
        id=identity.read_text(encoding="utf-8"),
        dir=str(run_folder),
        resume="allow",
        config=config.model_dump(mode="json"),
    )
