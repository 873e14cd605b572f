"""TensorBoard curves in the folder `tensorboard` of the run: `logging.tensorboard`."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cat_lm.callbacks import Callback, CallbackKind, Run
from cat_lm.core.errors import UserError
from cat_lm.core.files import AppendedFile
from cat_lm.training.metrics import finite_numbers

_event_files = itertools.count()


class TensorBoard(CallbackKind):
    name = "tensorboard"
    key = "logging.tensorboard"
    ranks = "first"

    def build(self, options: Any, run: Run) -> Callback:
        return Curves(run)


class Curves(Callback):
    """Write the numbers of every record to an event file."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def launch(self, step: int) -> None:
        folder, first = self._run.folder / "tensorboard", self._run.recorded_step + 1
        self.events = EventFile(folder, purge_step=first, log=self._run.log)

    def record(self, record: dict[str, Any]) -> None:
        scalars = {_group(name): value for name, value in finite_numbers(record).items()}
        self.events.add(record["step"], scalars)
        self._check()

    def end(self, step: int, exit_code: int) -> None:
        self.events.close()
        self._check()

    def _check(self) -> None:
        if self.events.error is not None:
            raise self.events.error


def _group(name: str) -> str:
    if name.startswith("tasks/"):
        return name
    return f"validation/{name}" if name.startswith("val_") else f"train/{name}"


class EventFile:
    """A TensorBoard event file of scalars; TensorBoard hides older scalars from `purge_step` on.

    It is written in the caller's thread. The writers of torch and tensorboard have a thread that a
    full disk ends with a traceback, after which adding another event may block forever. The first
    failed write is kept as `error`, as in `AppendedFile`.
    """

    def __init__(
        self, folder: Path, purge_step: int, log: Callable[[str], object] = lambda line: None
    ) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        name = f"{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_event_files)}"
        self._file = AppendedFile(folder / f"events.out.tfevents.{name}", log)
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


ENTRY = TensorBoard()
