"""Write a checkpoint's files, flushed and compared with memory, and fill an engine from them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm.config import RunConfig, changed_values
from cat_lm.core import __version__, plugins
from cat_lm.core.errors import UserError
from cat_lm.core.files import (
    causes_told,
    checksum,
    give_usual_mode,
    sync_directory,
    write_json,
    write_text,
)
from cat_lm.core.folders import empty_temporary, make_temporary, remove_temporary
from cat_lm.core.plugins import commit
from cat_lm.model.attention.objective import Objective
from cat_lm.training.checkpoint.files import (
    ALGORITHM,
    LATEST,
    RUN_CONFIG,
    STATE,
    WEIGHTS,
    RunState,
    Say,
    StoredFile,
    put_aside,
    read_run_config,
    read_run_state,
    step_of,
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
        from cat_lm.training.checkpoint.optimizer_state import checksum_as_written

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

    from cat_lm.training.checkpoint.optimizer_state import state_file, write_state
    from cat_lm.training.checkpoint.rng import save_random_states

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
    from cat_lm.training.checkpoint.optimizer_state import read_index

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
    write_text(final.parent / LATEST, final.name + "\n")
    try:
        remove_temporary(new.parent)
    except UserError as error:
        say(f"{error}; it stays")


# A run that changes one of these is another run. Others (rates, lengths, micro-batches) may change
# on resuming; the log then says which.
_FIXED_KEYS = ("model.", "data.context_length", "data.mask_documents", "data.packing")
_FIXED_KEYS += ("train.seed", "train.global_batch_size", "train.precision")
# The result does not depend on it, so the same run may go on with another one.
_FREE_KEYS = ("model.attn_implementation",)


@dataclass(frozen=True)
class Restored:
    """The place where a run goes on, and what of its settings is new, as lines for the log."""

    folder: Path
    state: RunState
    changed: list[str]


def read_compatible(folder: Path, config: RunConfig, world_size: int, fingerprint: str) -> Restored:
    """Read what a checkpoint says of itself.

    Raises:
        UserError: it belongs to other data, another model or batch, or to a run in which other
            weights learn.
    """
    state = read_run_state(folder)
    if state.step != step_of(folder):
        raise UserError(f"{folder / STATE}: step is {state.step}, which its folder's name is not")
    if state.data.fingerprint != fingerprint:
        raise UserError(
            f"{folder}: was trained on other data: its fingerprint is "
            f"{state.data.fingerprint[:12]}, {' + '.join(config.data.folders)} has "
            f"{fingerprint[:12]}"
        )
    before = read_run_config(folder)
    changes = changed_values(before.model_dump(mode="json"), config.model_dump(mode="json"))
    fixed = [
        f"{name} (was {a}, is {b})"
        for name, (a, b) in changes.items()
        if name.startswith(_FIXED_KEYS) and name not in _FREE_KEYS
    ]
    if fixed:
        raise UserError(f"{folder}: was trained with another {', '.join(fixed)}")
    _check_what_learns(folder, before.objective, config.objective)
    lines = [f"{name}: was {a}, is {b}" for name, (a, b) in changes.items()]
    if state.world_size != world_size:
        lines.append(
            f"ranks: was {state.world_size}, is {world_size}; random generators seeded anew from "
            f"train.seed, step {state.step}, rank and number of ranks"
        )
    now = plugins.describe()
    for name, was in state.code.plugins.items():
        if now.get(name, was) != was:  # what of it the model has cannot be seen from here
            lines.append(f"the plugin {name}: was {was}, is {now[name]}")
    return Restored(folder, state, lines)


def _check_what_learns(folder: Path, was: Objective, now: Objective) -> None:
    """Refuse to go on by moments that would move weights that must stay, or the reverse.

    Raises:
        UserError: naming what to do instead.
    """
    if was.trains_all != now.trains_all:
        alone = now if was.trains_all else was
        raise UserError(
            f"{folder}: was trained with {was.said}, and is to go on with {now.said}, where "
            f"{alone.said} alone leaves the other weights as they are; give another "
            "train.output_dir, and the model as train.init_from"
        )


def restore(engine: Engine, folder: Path, fingerprint: str) -> Restored:
    """Fill model, optimizer and generators (a collective).

    Raises:
        UserError: as `read_compatible`, or a file is damaged; on every rank.
    """
    from cat_lm.training.checkpoint import rng
    from cat_lm.training.checkpoint.optimizer_state import (
        StateIndex,
        check_weights,
        read_index,
        read_state,
        refresh_model,
    )

    ranks, config = engine.ranks, engine.config

    def look() -> tuple[Restored, StateIndex]:
        restored = read_compatible(folder, config, ranks.world_size, fingerprint)
        # Before the moments, which lie flat and could not say what shape is stored.
        check_weights(engine, folder / WEIGHTS)
        return restored, read_index(folder / "state", restored.state.world_size, engine)

    # The first rank alone reads what is the same for all; on a file system of many nodes that is
    # dear.
    found, index = ranks.broadcast(ranks.on_rank_zero(look))
    ranks.on_all_ranks(lambda: read_state(engine, index, folder / "state", folder / WEIGHTS))
    state = found.state
    refresh_model(engine, state.step, state.skipped)
    if state.world_size == ranks.world_size:
        path = folder / random_file(ranks.rank)
        ranks.on_all_ranks(lambda: rng.restore_random_states(path))
    else:
        rng.reseed(config.train.seed, state.step, ranks.rank, ranks.world_size)
    return found
