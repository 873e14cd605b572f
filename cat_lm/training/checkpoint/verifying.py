"""Verification of a checkpoint by all ranks together while the model is being built."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from cat_lm.core.errors import UserError
from cat_lm.training.checkpoint.finding import without_folder, wrong_file, wrong_size
from cat_lm.training.checkpoint.records import StoredFile, Unreadable, read_marker

if TYPE_CHECKING:
    from cat_lm.training.distributed import Ranks

# Bytes; smaller files are read before anything is built by what they say.
LARGE = 2**24


class Verifier:
    """Compares a checkpoint's files with its marker: each rank its share, all with one answer.

    Its methods are collectives. `look` compares all sizes and the content of small files, at once;
    `begin` starts to read the large ones, and `read` waits for what that finds.

    Args:
        progress: told which file is read, each time that some of it is.
    """

    def __init__(self, ranks: Ranks, progress: Callable[[str], object]) -> None:
        self._ranks, self._progress = ranks, progress
        self._files: dict[Path, dict[str, StoredFile]] = {}
        self._begun: tuple[Path, Future[str | None]] | None = None
        self._stopped = threading.Event()

    def look(self, folder: Path) -> str | None:
        """Say what is wrong with marker, sizes and small files, or None."""
        ranks = self._ranks

        def marker() -> dict[str, StoredFile] | str:
            try:
                return read_marker(folder)
            except Unreadable:
                raise
            except UserError as error:
                return without_folder(error, folder)

        files = ranks.broadcast(ranks.on_rank_zero(marker))
        if isinstance(files, str):
            return files
        self._files[folder] = files
        return self._first(
            lambda: (
                wrong_size(folder, self._share(files))
                or _compare(folder, self._share(files, large=False), self._progress)
            )
        )

    def begin(self, folder: Path) -> None:
        """Start to read the large files of a folder that was looked at, in threads."""
        files = self._share(self._files[folder], large=True)
        pool = ThreadPoolExecutor(1)
        # Nothing of this object's owner goes along, whose lock would be held as long as it reads.
        stopped, progress = self._stopped, self._progress

        def unless_stopped(what: str) -> None:
            if stopped.is_set():
                raise CancelledError
            progress(what)

        future = pool.submit(_compare, folder, files, unless_stopped)
        self._begun = (folder, future)
        pool.shutdown(wait=False)

    def read(self, folder: Path) -> str | None:
        """Say what is wrong with a folder, or None; waits where `begin` has begun, reads else."""
        if self._begun is None or self._begun[0] != folder:
            if problem := self.look(folder):
                return problem
            self.begin(folder)
        found = self._begun[1]
        return self._first(found.result)

    def stop(self) -> None:
        """End what `begin` has begun and nobody will wait for: the process ends only after it."""
        self._stopped.set()

    def _share(
        self, files: Mapping[str, StoredFile], large: bool | None = None
    ) -> dict[str, StoredFile]:
        share = list(files.items())[self._ranks.rank :: self._ranks.world_size]
        return {name: file for name, file in share if large in (None, file.bytes >= LARGE)}

    def _first(self, find: Callable[[], str | None]) -> str | None:
        """The first rank's finding that is one."""
        problems = self._ranks.gather(self._ranks.on_all_ranks(find))
        return next((problem for problem in problems if problem is not None), None)


def _compare(
    folder: Path, files: Mapping[str, StoredFile], progress: Callable[[str], object]
) -> str | None:
    return wrong_file(folder, files, lambda path: progress(f"verifying {path}"))
