"""The checkpoints of one run: choosing one to resume, saving, deleting and restoring them."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file

from cat_lm.config import RunConfig, changed_values
from cat_lm.core import __version__, plugins
from cat_lm.core.errors import (
    SharedError,
    TemporaryError,
    UserError,
    describe_os_error,
    is_temporary,
    shared_error,
)
from cat_lm.core.files import (
    checksum,
    give_usual_mode,
    raising_os_errors,
    sync_directory,
    write_json,
    write_text,
)
from cat_lm.core.folders import (
    Busy,
    Lock,
    empty_temporary,
    make_temporary,
    remove_temporary,
    take_lock,
    temporary_name,
)
from cat_lm.core.plugins import commit
from cat_lm.training.checkpoint import callback_state, files, optimizer_state
from cat_lm.training.checkpoint.callback_state import CallbackState
from cat_lm.training.checkpoint.files import Say, StoredFile

if TYPE_CHECKING:
    import torch

    from cat_lm.training.distributed import Ranks
    from cat_lm.training.engine import Engine

Tensors = Mapping[str, "torch.Tensor"]
CallbackStates = Mapping[str, CallbackState]


class Checkpoints:
    """Save, delete and restore the checkpoints of one run.

    Args:
        say: called with lines for the run's log.
        progress: called with a text whenever a part of a long action is done.
    """

    def __init__(
        self,
        run_folder: Path,
        config: RunConfig,
        ranks: Ranks,
        say: Say = lambda line: None,
        progress: Callable[[str], object] = lambda what: None,
    ) -> None:
        self.folder = run_folder / "checkpoints"
        self.config, self.ranks = config, ranks
        self._say, self._progress = say, progress
        self._current: Path | None = None  # the last one that this process saved or loaded
        self._lock = ranks.on_rank_zero(self._make_and_lock)

    def _make_and_lock(self) -> Lock:
        """Make the folder and lock it; the lock ends with this process in any case."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = take_lock(self.folder / ".lock", wait=False)
        except Busy:
            raise UserError(
                f"train.output_dir={self.config.train.output_dir}: another process trains in it"
            ) from None
        # Some cluster file systems have no locks, and a run must start there nevertheless.
        if lock.error:
            self._say(
                f"warning: {self.folder}: no locks here ({describe_os_error(lock.error)}): nothing "
                "keeps a second process out; start none in this train.output_dir"
            )
        return lock

    def close(self) -> None:
        if self._lock:
            self._lock.close()

    @property
    def newest_step(self) -> int | None:
        """Return the step of the checkpoint that this process saved or loaded last, or None."""
        return None if self._current is None else files.step_of(self._current)

    @property
    def recorded_step(self) -> int:
        """Return the step up to which the records in the run's folder belong to this run.

        It is 0 if the run starts from scratch, or from a checkpoint in another folder.
        """
        is_own = self._current is not None and files.lies_in(self._current, self.folder)
        return files.step_of(self._current) if is_own else 0

    def describe_left(self) -> str:
        return files.describe_left(self.folder)

    def find_checkpoint_to_resume(self) -> Path | None:
        """Return the checkpoint that `train.resume` asks for, or None (a collective).

        It is the newest undamaged one. The ranks together compare all its files with the marker;
        the log gets a line for each newer one that is damaged. Raises UserError if all are damaged,
        or if the run's folder has checkpoints of another run with which new ones would be mixed.
        """
        found = self.ranks.broadcast(self.ranks.on_rank_zero(self._find_candidates))
        start = None
        if found:
            try:
                start = files.newest_whole(found, self._damage, self._say)
            except UserError as error:
                text, passes = str(error), is_temporary(error)
                if self.config.train.resume == "auto" and not passes:
                    text += "; put it back from a copy, or start anew in another train.output_dir"
                raise shared_error(text, passes) from None
        self.ranks.on_rank_zero(lambda: self._check_mixture(start))
        if start is None:
            self.ranks.on_rank_zero(lambda: files.set_aside_later(self.folder, None, self._say))
        return start

    def _find_candidates(self) -> list[Path]:
        has_lock = self._lock is not None and self._lock.error is None
        files.clear_leftovers(self.folder, self._say, alone=has_lock)
        wish = self.config.train.resume
        if wish == "never":
            return []
        return files.step_folders(self.folder)[::-1] if wish == "auto" else files.candidates(wish)

    def _damage(self, folder: Path) -> str | None:
        """Return the damage of a checkpoint as text, equal on all ranks, or None (a collective)."""
        ranks = self.ranks
        share = slice(ranks.rank, None, ranks.world_size)

        def look() -> str | None:
            return files.damage(folder, share, lambda path: self._progress(f"verifying {path}"))

        problems = ranks.gather(ranks.on_all_ranks(look))
        return next((problem for problem in problems if problem is not None), None)

    def _check_mixture(self, start: Path | None) -> None:
        """Raise UserError if new checkpoints would be mixed with those in the run's folder.

        If the folder has checkpoints, only its newest one can be resumed. A checkpoint in another
        folder belongs to another run, whose checkpoints and records are not this run's.
        """
        if self.config.train.resume == "auto":
            return
        own = next(
            (path for path in files.step_folders(self.folder)[::-1] if _has_marker(path)), None
        )
        if own is None:
            return
        is_own = start is not None and files.lies_in(start, self.folder)
        if not is_own or files.step_of(own) > files.step_of(start):
            raise UserError(
                f"train.output_dir={self.config.train.output_dir}: already holds {own.name}; "
                "train.resume=auto goes on from the newest whole checkpoint, "
                "another train.output_dir starts anew"
            )

    def load(self, folder: Path, engine: Engine, fingerprint: str) -> Restored:
        """Restore model, optimizer and generators from a checkpoint (a collective).

        `folder` is the result of `find_checkpoint_to_resume`; later checkpoint folders, which are
        incomplete, are renamed. Raises UserError on every rank if the checkpoint belongs to other
        data, another model or another batch size, or is damaged.
        """
        restored = restore(engine, folder, fingerprint)
        self.ranks.on_rank_zero(lambda: files.set_aside_later(self.folder, folder, self._say))
        self._current = folder
        return restored

    def save(
        self,
        engine: Engine,
        state: dict[str, Any],
        tokenizer: Path,
        *,
        prune: bool = True,
        callbacks: Callable[[], CallbackStates] = dict,
    ) -> Path:
        """Save a checkpoint and delete old ones; return its folder (a collective).

        Args:
            state: values of state.json, with the number of steps in `step`.
            tokenizer: the folder of the tokenizer, which is copied.
            prune: whether to delete old checkpoints.
            callbacks: returns the states of callbacks by name.

        Raises:
            SharedError: it could not be written, or weights or moments are not finite; older
                checkpoints are unchanged.
            RuntimeError: a collective failed, probably because another rank has ended.
        """
        final = self.folder / f"step-{state['step']:08d}"
        if final == self._current:
            return final
        if names := sorted(set().union(*self.ranks.gather(optimizer_state.find_nonfinite(engine)))):
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise SharedError(
                f"step {state['step']}: {', '.join(names[:3])}{more}: not finite; no checkpoint is "
                f"made of it; {self.describe_left()}; a lower optimizer.lr may help"
            )
        try:
            self._write(final, engine, state, tokenizer, callbacks)
        except UserError as error:
            why = " ".join(str(error).split()) or type(error).__name__
            text = f"{final}: the checkpoint could not be written ({why}); {self.describe_left()}"
            raise shared_error(text, is_temporary(error)) from error
        self._current = final
        if prune:
            rule = self.config.checkpoint
            self.ranks.on_rank_zero(lambda: files.prune(self.folder, rule, final, self._say))
        return final

    def _write(
        self,
        final: Path,
        engine: Engine,
        state: dict[str, Any],
        tokenizer: Path,
        callbacks: Callable[[], CallbackStates],
    ) -> None:
        ranks, progress = self.ranks, self._progress
        # The name has rank 0's process id, so that other runs, without locks, use other folders.
        temporary = ranks.broadcast(temporary_name(final, "saving"))
        new = temporary / final.name
        try:
            ranks.on_rank_zero(lambda: make_empty_folder(new))
            weights = optimizer_state.full_precision_weights(engine)
            states = callbacks()
            progress("gathering the weights")
            own = ranks.on_all_ranks(
                lambda: write_own_files(new, engine, weights, state, tokenizer, states, progress)
            )
            written = {name: file for part in ranks.gather(own) for name, file in part.items()}
            ranks.on_rank_zero(lambda: mark_complete(new, final, written, engine, self._say))
        except UserError:
            if ranks.is_first:
                with contextlib.suppress(UserError, OSError):
                    remove_temporary(temporary)
            raise


def _has_marker(folder: Path) -> bool:
    try:
        files.read_marker(folder)
    except TemporaryError:
        raise
    except UserError:
        return False
    return True


def random_file(rank: int) -> str:
    return f"random-{rank:05d}.pt"


def make_empty_folder(new: Path) -> None:
    """Make an empty folder to write a checkpoint to, and remove the files of a failed save."""
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
    callback_states: CallbackStates,
    progress: Callable[[str], object],
) -> dict[str, StoredFile]:
    """Write, flush and check this rank's files; rank 0 also writes those of the whole model.

    Return the size and checksum of each file by its relative path. Raises OSError if a file's
    content is wrong.
    """
    ranks = engine.ranks
    moments = optimizer_state.write_state(engine, new / "state")
    optimizer_state.save_random_states(new / random_file(ranks.rank))
    own: list[tuple[Path, Tensors]] = [
        (new / "state" / optimizer_state.state_file(ranks.rank), moments),
        (new / random_file(ranks.rank), {}),
    ]
    if ranks.is_first:
        with raising_os_errors(new / files.WEIGHTS):
            save_file(weights, new / files.WEIGHTS, {"format": "pt"})
        own.append((new / files.WEIGHTS, weights))
        own += callback_state.write_callback_states(new, callback_states)
        engine.model.config.save_pretrained(new / "model")
        with raising_os_errors(new / "tokenizer"):
            shutil.copytree(tokenizer, new / "tokenizer")
        engine.config.save(new / files.RUN_CONFIG)
        code = {"cat_lm": __version__, "commit": commit(), "plugins": plugins.describe()}
        state = {"format": 1, **state, "world_size": ranks.world_size, "code": code}
        write_json(new / files.STATE, state)
        give_usual_mode(new / "tokenizer")
        small = [*(new / "model").rglob("*"), *(new / "tokenizer").rglob("*")]
        for path in (new / files.RUN_CONFIG, new / files.STATE, *small):
            if path.is_dir():
                give_usual_mode(path)
            elif path != new / files.WEIGHTS:
                own.append((path, {}))
    written = {}
    with ThreadPoolExecutor(4) as pool:
        checksums = pool.map(flush_and_hash, [path for path, _ in own])
        for (path, tensors), checksum_ in zip(own, checksums, strict=True):
            if tensors:
                optimizer_state.check_stored(path, tensors)
            name = str(path.relative_to(new))
            written[name] = StoredFile(bytes=path.stat().st_size, checksum=checksum_)
            progress(f"writing {name}")
    return written


def flush_and_hash(path: Path) -> str:
    """Flush a file to disk, and return its checksum."""
    give_usual_mode(path)
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())
    return checksum(path, files.ALGORITHM)


def mark_complete(
    new: Path, final: Path, written: Mapping[str, StoredFile], engine: Engine, say: Say
) -> None:
    """Write the completion marker for the files of all ranks, and rename the folder into place.

    Raises UserError or OSError if this rank sees another rank's file differently than it was
    written.
    """
    # A checkpoint that cannot be read must never be marked as complete.
    optimizer_state.read_index(new / "state", engine.ranks.world_size, engine)
    for name, file in written.items():
        if (new / name).stat().st_size != file.bytes:
            raise OSError(f"{name} has another size here than where it was written")
    for folder in (new, *(path for path in new.rglob("*") if path.is_dir())):
        sync_directory(folder)
    files.write_marker(new, written)
    if os.path.lexists(final):
        files.rename_aside(final, "of this step, but no part of this run's past", say)
    os.rename(new, final)
    sync_directory(final.parent)
    write_text(final.parent / files.LATEST, final.name + "\n")
    try:
        remove_temporary(new.parent)
    except UserError as error:
        say(f"{error}; it stays")


# A run with another value of one of these keys is another run. Other keys (learning rates, lengths,
# micro-batches) may change on resuming; the log then lists them.
_FIXED_KEYS = ("model.", "data.context_length", "data.mask_documents", "data.packing")
_FIXED_KEYS += ("train.seed", "train.global_batch_size", "train.precision")
# Results do not depend on these keys, so that they may change on resuming.
_FREE_KEYS = ("model.attn_implementation",)


@dataclass(frozen=True)
class Restored:
    """The checkpoint that was restored, and the changed settings as lines for the log."""

    folder: Path
    state: files.RunState
    changed: list[str]
    is_reset: bool = False  # True if another optimizer starts with an empty state


def read_compatible(folder: Path, config: RunConfig, world_size: int, fingerprint: str) -> Restored:
    """Read a checkpoint's state and configuration, and check that this run can resume it.

    Raises UserError if it belongs to other data, another model or batch size, or to a run that
    trains other weights.
    """
    state = files.read_run_state(folder)
    if state.step != files.step_of(folder):
        raise UserError(
            f"{folder / files.STATE}: step is {state.step}, which its folder's name is not"
        )
    if state.data.fingerprint != fingerprint:
        raise UserError(
            f"{folder}: was trained on other data: its fingerprint is "
            f"{state.data.fingerprint[:12]}, {' + '.join(config.data.folders)} has "
            f"{fingerprint[:12]}"
        )
    before = files.read_run_config(folder)
    changes = changed_values(before.model_dump(mode="json"), config.model_dump(mode="json"))
    fixed = [
        f"{name} (was {a}, is {b})"
        for name, (a, b) in changes.items()
        if name.startswith(_FIXED_KEYS) and name not in _FREE_KEYS
    ]
    if fixed:
        raise UserError(f"{folder}: was trained with another {', '.join(fixed)}")
    was, now = before.objective, config.objective
    if was.trains_all != now.trains_all:  # Old moments would move weights that are frozen now.
        alone = now if was.trains_all else was
        raise UserError(
            f"{folder}: was trained with {was.said}, and is to go on with {now.said}, where "
            f"{alone.said} alone leaves the other weights as they are; give another "
            "train.output_dir, and the model as train.init_from"
        )
    was, now = before.optimizer.name, config.optimizer.name
    if was != now and not config.train.reset_optimizer:
        raise UserError(
            f"{folder}: optimizer.name was {was}, is {now}; train.reset_optimizer=true begins "
            "with an empty state of the new one"
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
    return Restored(folder, state, lines, is_reset=was != now)


def restore(engine: Engine, folder: Path, fingerprint: str) -> Restored:
    """Restore model, optimizer and generators (a collective); raises as `Checkpoints.load` does."""
    ranks, config = engine.ranks, engine.config

    def look() -> tuple[Restored, optimizer_state.StateIndex]:
        restored = read_compatible(folder, config, ranks.world_size, fingerprint)
        # Check shapes by the weights, because moments are stored flat.
        optimizer_state.check_weights(engine, folder / files.WEIGHTS)
        if restored.is_reset:
            return restored, optimizer_state.StateIndex(0, {})
        return restored, optimizer_state.read_index(
            folder / "state", restored.state.world_size, engine
        )

    # Only rank 0 reads what is equal for all; reads by many nodes would be slow.
    found, index = ranks.broadcast(ranks.on_rank_zero(look))
    ranks.on_all_ranks(
        lambda: optimizer_state.read_state(engine, index, folder / "state", folder / files.WEIGHTS)
    )
    state = found.state
    optimizer_state.refresh_model(engine, state.step, state.skipped)
    if state.world_size == ranks.world_size:
        path = folder / random_file(ranks.rank)
        ranks.on_all_ranks(lambda: optimizer_state.restore_random_states(path))
    else:
        optimizer_state.reseed(config.train.seed, state.step, ranks.rank, ranks.world_size)
    return found
