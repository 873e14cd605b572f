"""TensorBoard's event files, written at once and in the caller's thread.

The writers of torch and tensorboard have a thread of their own: a full disk ends it with a
traceback, and whoever hands it another event, or closes it, may wait for ever.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from cat_lm.core.errors import UserError
from cat_lm.core.files import AppendedFile

_files_made = itertools.count()


class EventFile:
    """One file of scalars in `folder`; TensorBoard hides older ones from `purge_step` on.

    A write that fails is kept as `error`, as `AppendedFile` does.
    """

    def __init__(
        self, folder: Path, purge_step: int, say: Callable[[str], object] = lambda line: None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_files_made)}"
        self._file = AppendedFile(folder / f"events.out.tfevents.{name}", say)
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2", step=purge_step)
        self._write(session_log=SessionLog(status=SessionLog.START), step=purge_step)

    @property
    def error(self) -> UserError | None:
        return self._file.error

    def add(self, step: int, scalars: dict[str, float]) -> None:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(summary=Summary(value=values), step=step)

    def close(self) -> None:
        self._file.close()

    def _write(self, **content: Any) -> None:
        self._records.write(Event(wall_time=time.time(), **content).SerializeToString())
