"""Write a checkpoint's files, flushed and compared with memory, and fill an engine from them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
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

    Raises:
        OSError: a file could not be written or flushed, or does not hold what it must.
    """
    from safetensors.torch import save_file

    from cat_lm.training.checkpoint.optimizer_state import check_stored, state_file, write_state
    from cat_lm.training.checkpoint.rng import save_random_states

    ranks = engine.ranks
    moments = write_state(engine, new / "state")
    save_random_states(new / random_file(ranks.rank))
    own: list[tuple[Path, Tensors]] = [
        (new / "state" / state_file(ranks.rank), moments),
        (new / random_file(ranks.rank), {}),
    ]
    if ranks.is_first:
        with causes_told(new / WEIGHTS):
            save_file(weights, new / WEIGHTS, {"format": "pt"})
        own.append((new / WEIGHTS, weights))
        engine.model.config.save_pretrained(new / "model")
        with causes_told(new / "tokenizer"):
            shutil.copytree(tokenizer, new / "tokenizer")
        engine.config.save(new / RUN_CONFIG)
        code = {"cat_lm": __version__, "commit": commit(), "plugins": plugins.describe()}
        state = {"format": 1, **state, "world_size": ranks.world_size, "code": code}
        write_json(new / STATE, state)
        give_usual_mode(new / "tokenizer")
        small = [*(new / "model").rglob("*"), *(new / "tokenizer").rglob("*")]
        for path in (new / RUN_CONFIG, new / STATE, *small):
            if path.is_dir():
                give_usual_mode(path)
            elif path != new / WEIGHTS:
                own.append((path, {}))
    files = {}
    with ThreadPoolExecutor(4) as pool:
        checksums = pool.map(flush, [path for path, _ in own])
        for (path, tensors), checksum_ in zip(own, checksums, strict=True):
            if tensors:
                check_stored(path, tensors)
            name = str(path.relative_to(new))
            files[name] = StoredFile(bytes=path.stat().st_size, checksum=checksum_)
            progress(f"writing {name}")
    return files


def flush(path: Path) -> str:
    """Wait until a file is on the disk, and return its checksum."""
    give_usual_mode(path)
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())
    return checksum(path, ALGORITHM)


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
    was, now = before.objective, config.objective
    if was.trains_all != now.trains_all:  # Moments would move weights that must stay, or not.
        alone = now if was.trains_all else was
        raise UserError(
            f"{folder}: was trained with {was.said}, and is to go on with {now.said}, where "
            f"{alone.said} alone leaves the other weights as they are; give another "
            "train.output_dir, and the model as train.init_from"
        )
    lines = [f"{name}: was {a}, is {b}" for name, (a, b) in changes.items()]
    if state.world_size != world_size:
        lines.append(
            f"ranks: was {state.world_size}, is {world_size}; random generators seeded anew from "
            f"train.seed, step {state.step}, rank and number of ranks"
        )
    found = plugins.describe()
    for name, code in state.code.plugins.items():
        if found.get(name, code) != code:
            lines.append(f"the plugin {name}: was {code}, is {found[name]}")
    return Restored(folder, state, lines)


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

    # The first rank alone reads what is the same for all, which many nodes would read slowly.
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
