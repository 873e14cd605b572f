"""The run's folder: whether a node writes to it, and whether it is the same one on all nodes."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from cat_lm.core.errors import describe_os_error, is_temporary

# A network file system may show a new file late, and a folder that was looked for before it was
# made later still: NFS asks the server again after 30 seconds.
PATIENCE_SECONDS = 40.0


@dataclass(frozen=True)
class FolderFacts:
    """The facts of `train.output_dir` on a node.

    Attributes:
        problem: why it cannot be used from there, or None.
        may_pass: whether the problem may be gone at the next start.
        free: bytes that are free in it; 0 where there is a problem.
        checkpoints: complete ones that it holds already, no more than the run keeps; None where
            another node counted them, as each of many ranks has files to be looked at.
    """

    problem: str | None
    free: int = 0
    checkpoints: int | None = None
    may_pass: bool = False


@dataclass(frozen=True)
class Probe:
    """The run's folder, and the file that rank 0, on `host`, writes into it for all to see."""

    folder: Path
    token: str
    host: str

    @property
    def file(self) -> Path:
        return self.folder / f".preflight-{self.token}"

    def write(self) -> bool:
        """Makes folder and file. A failure, said by False, shows where they are looked for."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file.write_text(self.token, encoding="ascii")
            return True
        return False

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.file.unlink(missing_ok=True)

    def look(self, is_first: bool, written: bool, keep_last: int) -> FolderFacts:
        """Look at the folder from this node.

        Args:
            is_first: on the node that wrote the file.
            written: whether it could; else there is nothing to wait for.
            keep_last: the run's; more checkpoints are not counted.
        """
        seen = _sees(self.file, PATIENCE_SECONDS if written and not is_first else 0)
        try:
            self._try_to_write()
        except OSError as error:
            where = error.filename or self.folder
            problem = f"cannot be written to: {where}: {describe_os_error(error)}"
            return FolderFacts(problem, may_pass=is_temporary(error))
        if not seen:
            return FolderFacts(
                f"is not the folder that rank 0 writes to on {self.host}; "
                "choose one on a file system that all nodes share"
            )
        free = shutil.disk_usage(self.folder).free
        saved = saved_checkpoints(self.folder, keep_last) if is_first else None
        return FolderFacts(None, free, saved)

    def _try_to_write(self) -> None:
        """Write to the folder, or make it where it is not there. Raises OSError."""
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True)  # says best what stands in the way
            os.rmdir(self.folder)
            return
        own = self.folder / f".preflight-{self.token}-{socket.gethostname()}-{os.getpid()}"
        try:
            own.write_text(self.token, encoding="ascii")
        finally:
            own.unlink(missing_ok=True)


def saved_checkpoints(folder: Path, most: int) -> int:
    """Count a run's complete checkpoints, which have their room already, up to `most`."""
    from cat_lm.training.checkpoint import is_complete, step_folders

    newest_first = reversed(step_folders(folder / "checkpoints"))
    return len(list(itertools.islice(filter(is_complete, newest_first), most)))


def _sees(path: Path, patience: float) -> bool:
    deadline = time.monotonic() + patience
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
        # Reading the folder makes a network file system ask the server again.
        for folder in (path.parent.parent, path.parent):
            if folder.is_dir():
                os.listdir(folder)
    return True
