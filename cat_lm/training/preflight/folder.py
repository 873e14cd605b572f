"""The run's folder: whether a node writes to it, and whether it is the same one on all nodes."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from cat_lm.errors import describe_os_error

# A network file system may show a new file late, but sooner than this once the folder is read.
PATIENCE_SECONDS = 5.0


@dataclass(frozen=True)
class FolderFacts:
    """The facts of `train.output_dir` on a node.

    Attributes:
        problem: why it cannot be used from there, or None.
        free: bytes that are free in it; 0 where there is a problem.
        checkpoints: complete ones that it holds already.
    """

    problem: str | None
    free: int = 0
    checkpoints: int = 0


@dataclass(frozen=True)
class Probe:
    """The run's folder, and the file that rank 0, on `host`, writes into it for all to see."""

    folder: Path
    token: str
    host: str

    @property
    def file(self) -> Path:
        return self.folder / f".preflight-{self.token}"

    def write(self) -> None:
        """Makes folder and file. A failure shows where they are looked for."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file.write_text(self.token, encoding="ascii")

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.file.unlink(missing_ok=True)

    def look(self, is_first: bool) -> FolderFacts:
        """Look at the folder from this node; `is_first` on the node that wrote the file."""
        from cat_lm.training.checkpoint import complete_checkpoints

        problem = self._writing_problem()
        if problem is None and not _sees(self.file, 0 if is_first else PATIENCE_SECONDS):
            problem = (
                f"is not the folder that rank 0 writes to on {self.host}; "
                "choose one on a file system that all nodes share"
            )
        if problem is not None:
            return FolderFacts(problem)
        saved = len(complete_checkpoints(self.folder / "checkpoints"))
        return FolderFacts(None, shutil.disk_usage(self.folder).free, saved)

    def _writing_problem(self) -> str | None:
        own = self.folder / f".preflight-{self.token}-{socket.gethostname()}-{os.getpid()}"
        try:
            if not self.folder.is_dir():
                self.folder.mkdir(parents=True)  # says best what stands in the way
                os.rmdir(self.folder)
                return None
            try:
                own.write_text(self.token, encoding="ascii")
            finally:
                own.unlink(missing_ok=True)
        except OSError as error:
            return f"cannot be written to: {error.filename or own}: {describe_os_error(error)}"
        return None


def _sees(path: Path, patience: float) -> bool:
    deadline = time.monotonic() + patience
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
        # Reading the folder makes a network file system ask the server again.
        if path.parent.is_dir():
            os.listdir(path.parent)
    return True
