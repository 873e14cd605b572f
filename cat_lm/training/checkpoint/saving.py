"""Writing a checkpoint's files: flushed, hashed and compared with memory, then shown at once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm.core import __version__, plugins
from cat_lm.core.causes import causes_told
from cat_lm.core.checksums import checksum
from cat_lm.core.commit import commit
from cat_lm.core.files import give_usual_mode, sync_directory, write_json, write_text
from cat_lm.core.temporary import empty_temporary, make_temporary, remove_temporary
from cat_lm.training.checkpoint.finding import Say
from cat_lm.training.checkpoint.folder import LATEST, put_aside
from cat_lm.training.checkpoint.records import (
    ALGORITHM,
    RUN_CONFIG,
    STATE,
    WEIGHTS,
    StoredFile,
    write_marker,
)

if TYPE_CHECKING:
    import torch

    from cat_lm.training.engine import Engine

Tensors = Mapping[str, "torch.Tensor"]


def random_file(rank: int) -> str:
    """Name the file of a rank's generator states."""
    return f"random-{rank:05d}.pt"


def prepare(new: Path) -> None:
    """Make the folder that a checkpoint is written to, in place of what a failed save left."""
    make_temporary(new.parent)
    empty_temporary(new.parent)
    for name in ("model", "state"):
        (new / name).mkdir(parents=True)


@dataclass
class _Written:
    path: Path
    flushed: Future
    digest: Future
    tensors: Tensors | None


class Flusher:
    """Flushes and hashes files in threads, while the next ones are being written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(4)
        self._written: list[_Written] = []

    def __enter__(self) -> Flusher:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, path: Path, tensors: Tensors | None = None) -> None:
        """Take a file that is written, and the tensors that it must hold."""
        give_usual_mode(path)
        flushed = self._pool.submit(flush, path)
        digest = self._pool.submit(checksum, path, ALGORITHM)
        self._written.append(_Written(path, flushed, digest, tensors))

    def finish(self, progress: Callable[[str], object]) -> dict[str, StoredFile]:
        """Wait for all files; return their sizes and checksums by their names in the folder.

        Raises:
            OSError: one could not be flushed, or does not hold what it must, bit for bit.
        """
        from cat_lm.training.optimizer_state import checksum_as_written

        files = {}
        for written in self._written:
            path, digest = written.path, None
            if written.tensors is not None:
                digest = checksum_as_written(path, written.tensors)
            if digest not in (None, written.digest.result()):
                raise OSError(f"{path.name} was not stored as it is")
            written.flushed.result()
            name = str(path.relative_to(self._folder))
            files[name] = StoredFile(bytes=path.stat().st_size, checksum=written.digest.result())
            progress(f"writing {name}")
        return files


def flush(path: Path) -> None:
    """Wait until a file is on the disk."""
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())


def write_own_files(
    new: Path,
    engine: Engine,
    weights: Tensors,
    state: dict[str, Any],
    tokenizer: Path,
    progress: Callable[[str], object],
) -> dict[str, StoredFile]:
    """Write, flush and check this rank's files; the first rank's are also those of the whole.

    Args:
        weights: of the whole model with its buffers, on the first rank.

    Returns:
        Each file's size and checksum, by its name in the folder.
    """
    from safetensors.torch import save_file

    from cat_lm.training.optimizer_state import state_file, write_state
    from cat_lm.training.rng import save_random_states

    ranks = engine.ranks
    with Flusher(new) as files:
        moments = write_state(engine, new / "state")
        files.add(new / "state" / state_file(ranks.rank), moments)
        save_random_states(new / random_file(ranks.rank))
        files.add(new / random_file(ranks.rank))
        if ranks.is_first:
            with causes_told(new / WEIGHTS):
                save_file(weights, new / WEIGHTS, {"format": "pt"})
            files.add(new / WEIGHTS, weights)
            engine.model.config.save_pretrained(new / "model")
            with causes_told(new / "tokenizer"):
                shutil.copytree(tokenizer, new / "tokenizer")
            engine.config.save(new / RUN_CONFIG)
            code = {"cat_lm": __version__, "commit": commit(), "plugins": plugins.describe()}
            state = {"format": 1, **state, "world_size": ranks.world_size, "code": code}
            write_json(new / STATE, state)
            copied = [new / "tokenizer", *(new / "tokenizer").rglob("*")]
            small = [*(new / "model").rglob("*"), *copied]
            for path in (new / RUN_CONFIG, new / STATE, *small):
                if path.is_dir():
                    give_usual_mode(path)
                elif path.is_file() and path != new / WEIGHTS:
                    files.add(path)
        return files.finish(progress)


def publish(
    new: Path, final: Path, files: Mapping[str, StoredFile], engine: Engine, say: Say
) -> None:
    """Mark what all ranks have written as complete, and give it its name.

    Raises:
        UserError, OSError: a rank's file is not what it wrote, as this one sees it.
    """
    from cat_lm.training.optimizer_state import read_index

    # What cannot be read must never be marked as complete.
    read_index(new / "state", engine.ranks.world_size, engine)
    for name, file in files.items():
        if (new / name).stat().st_size != file.bytes:
            raise OSError(f"{name} has another size here than where it was written")
    for folder in (new, *(path for path in new.rglob("*") if path.is_dir())):
        sync_directory(folder)
    write_marker(new, files)
    if os.path.lexists(final):
        put_aside(final, "of this step, but no part of this run's past", say)
    os.rename(new, final)
    sync_directory(final.parent)
    remove_temporary(new.parent)
    write_text(final.parent / LATEST, final.name + "\n")
