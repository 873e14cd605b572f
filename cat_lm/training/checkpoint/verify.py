"""The search for the newest checkpoint whose files are all as they were written."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from cat_lm.core.errors import TemporaryError, UserError
from cat_lm.core.files import checksums
from cat_lm.training.checkpoint.files import (
    ALGORITHM,
    MARKER,
    STEP_FOLDER,
    Say,
    StoredFile,
    Unreadable,
    describe_absent,
    read_marker,
    step_folders,
    without_folder,
    wrong_size,
)

if TYPE_CHECKING:
    from cat_lm.training.distributed import Ranks


def say_to_stderr(line: str) -> None:
    """Print a line on stderr, where commands print what is no result."""
    print(line, file=sys.stderr)


def find_checkpoint(path: Path | str, say: Say = say_to_stderr) -> Path:
    """Find the newest whole checkpoint at `path`: a run, a `checkpoints` or a step folder.

    Every file of the folder that is returned is there and has the size and the checksum of its
    marker, so it holds what training wrote, and that was finite. Newer ones that were passed over
    have a line each.

    Args:
        say: takes these lines.

    Raises:
        UserError: there is none; weights are never made up.
    """
    return newest_whole(candidates(path), damage, say)


def candidates(path: Path | str) -> list[Path]:
    """List the step folders at `path`, whole or not, newest first.

    Raises:
        UserError: there is none.
    """
    if not str(path):
        raise UserError("'': is no path; give a run folder or a step folder")
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such checkpoint or run folder")
    if STEP_FOLDER.fullmatch(path.name):
        return [path]
    for folder in (path / "checkpoints", path):
        if found := step_folders(folder):
            return found[::-1]
    raise UserError(f"{path}: holds no complete checkpoint (a step-… folder with {MARKER})")


def newest_whole(found: list[Path], damage_of: Callable[[Path], str | None], say: Say) -> Path:
    """Take the first of `found` that `damage_of` finds nothing wrong with.

    Raises:
        UserError: there is none; the line says what is wrong with the first.
    """
    problems = []
    for folder in found:
        problem = damage_of(folder)
        if problem is None:
            return folder
        problems.append(problem)
        if len(found) > 1:
            say(f"{folder}: passed over: {problem}")
    if len(found) == 1:
        raise UserError(f"{found[0]}: is not a complete checkpoint: {problems[0]}")
    raise UserError(
        f"{found[0].parent}: holds no complete checkpoint, none of {len(found)} is whole; the "
        f"newest, {found[0].name}: {problems[0]}"
    )


def damage(folder: Path) -> str | None:
    """Describe what is wrong with a step folder; None if nothing. Reads all files, in threads."""
    try:
        files = read_marker(folder)
    except TemporaryError:
        raise
    except UserError as error:
        return without_folder(error, folder)
    return wrong_file(folder, files)


def wrong_file(
    folder: Path,
    files: Mapping[str, StoredFile],
    reading: Callable[[Path], object] = lambda path: None,
) -> str | None:
    """Name the first file that is not as the marker lists it; None if all are.

    Args:
        reading: as in `cat_lm.core.files.checksums`.
    """
    if problem := wrong_size(folder, files):
        return problem
    try:
        found = checksums([folder / name for name in files], ALGORITHM, reading)
    except OSError as error:
        name = str(Path(error.filename).relative_to(folder)) if error.filename else ""
        return describe_absent(folder, name, error)
    for name, file in files.items():
        if found[folder / name] != file.checksum:
            return f"{name}: its checksum differs from the one in {MARKER}"
    return None


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
        """Return what is wrong with marker, sizes and small files, or None."""
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
        """Return what is wrong with a folder, or None; wait where `begin` has begun, else read."""
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
