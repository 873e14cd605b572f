"""The checkpoints of one run: which to go on from, saving, pruning and restoring them."""

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
    """Saves, prunes and restores the checkpoints of one run.

    Args:
        say: takes the lines for the run's log.
        progress: called with what was done, each time that some of a long action is.
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
        self._current: Path | None = None  # saved or loaded last by this process
        self._lock = ranks.on_rank_zero(self._open)

    def _open(self) -> Lock:
        """Make the folder, for this process alone: the lock ends with it, however it ends."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = take_lock(self.folder / ".lock", wait=False)
        except Busy:
            raise UserError(
                f"train.output_dir={self.config.train.output_dir}: another process trains in it"
            ) from None
        # Some cluster file systems have no locks; a run there must start all the same.
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
        """The step of the checkpoint that this process saved or loaded last."""
        return None if self._current is None else files.step_of(self._current)

    @property
    def recorded_step(self) -> int:
        """The step up to which the folder's records are this run's past.

        0 where it begins with nothing, or with a checkpoint of another folder.
        """
        is_own = self._current is not None and files.lies_in(self._current, self.folder)
        return files.step_of(self._current) if is_own else 0

    def describe_left(self) -> str:
        return files.describe_left(self.folder)

    def to_resume(self) -> Path | None:
        """Choose the checkpoint that `train.resume` asks for (a collective).

        The newest whole one, of which all files are compared with the marker, each rank its share:
        each newer one has a line that says what is wrong with it. Raises UserError where none is
        whole, or the run's folder has checkpoints that a start from there would mix with its own.
        """
        found = self.ranks.broadcast(self.ranks.on_rank_zero(self._candidates))
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

    def _candidates(self) -> list[Path]:
        has_lock = self._lock is not None and self._lock.error is None
        files.clear_leftovers(self.folder, self._say, alone=has_lock)
        wish = self.config.train.resume
        if wish == "never":
            return []
        return files.step_folders(self.folder)[::-1] if wish == "auto" else files.candidates(wish)

    def _damage(self, folder: Path) -> str | None:
        """Describe what is wrong with a checkpoint, the same on all ranks; None if nothing."""
        ranks = self.ranks
        share = slice(ranks.rank, None, ranks.world_size)

        def look() -> str | None:
            return files.damage(folder, share, lambda path: self._progress(f"verifying {path}"))

        problems = ranks.gather(ranks.on_all_ranks(look))
        return next((problem for problem in problems if problem is not None), None)

    def _check_mixture(self, start: Path | None) -> None:
        """Refuse a start that would mix its checkpoints with those of the run's folder.

        Only the newest of the folder's own can be gone on from; what lies elsewhere, of whatever
        step, is another run's past, whose pruning and records must not be taken for this one's.
        """
        if self.config.train.resume == "auto":
            return
        own = next((path for path in files.step_folders(self.folder)[::-1] if _is_ours(path)), None)
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
        """Restore model, optimizer and generators (a collective), and set later ones aside.

        Raises UserError, on every rank, where the folder, which `to_resume` chose, belongs to other
        data, another model or batch, or is damaged.
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
        """Save the state after `state["step"]` steps, and `prune` old checkpoints (a collective).

        `callbacks` returns the states of callbacks, by name.

        Raises:
            SharedError: it could not be written, or weights or moments are not finite; older
                checkpoints are untouched.
            RuntimeError: a collective failed, most likely because another rank has ended.
        """
        final = self.folder / f"step-{state['step']:08d}"
        if final == self._current:
            return final
        if names := sorted(set().union(*self.ranks.gather(optimizer_state.not_finite(engine)))):
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
        # Of the first rank, so that no other run, where there are no locks, has the same folder.
        temporary = ranks.broadcast(temporary_name(final, "saving"))
        new = temporary / final.name
        try:
            ranks.on_rank_zero(lambda: prepare(new))
            weights = optimizer_state.full_precision_weights(engine)
            states = callbacks()
            progress("gathering the weights")
            own = ranks.on_all_ranks(
                lambda: write_own_files(new, engine, weights, state, tokenizer, states, progress)
            )
            written = {name: file for part in ranks.gather(own) for name, file in part.items()}
            ranks.on_rank_zero(lambda: publish(new, final, written, engine, self._say))
        except UserError:
            if ranks.is_first:
                with contextlib.suppress(UserError, OSError):
                    remove_temporary(temporary)
            raise


def _is_ours(folder: Path) -> bool:
    try:
        files.read_marker(folder)
    except TemporaryError:
        raise
    except UserError:
        return False
    return True


def random_file(rank: int) -> str:
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
    callback_states: CallbackStates,
    progress: Callable[[str], object],
) -> dict[str, StoredFile]:
    """Write, flush and check this rank's files; the first rank's are also those of the whole.

    Returns each file's size and checksum, by its name in the folder; raises OSError where one does
    not hold what it must.
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
        checksums = pool.map(flush, [path for path, _ in own])
        for (path, tensors), checksum_ in zip(own, checksums, strict=True):
            if tensors:
                optimizer_state.check_stored(path, tensors)
            name = str(path.relative_to(new))
            written[name] = StoredFile(bytes=path.stat().st_size, checksum=checksum_)
            progress(f"writing {name}")
    return written


def flush(path: Path) -> str:
    """Wait until a file is on the disk, and return its checksum."""
    give_usual_mode(path)
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())
    return checksum(path, files.ALGORITHM)


def publish(
    new: Path, final: Path, written: Mapping[str, StoredFile], engine: Engine, say: Say
) -> None:
    """Mark what all ranks have written as complete, and give it its name.

    Raises UserError or OSError where a rank's file is not what it wrote, as this one sees it.
    """
    # What cannot be read must never be marked as complete.
    optimizer_state.read_index(new / "state", engine.ranks.world_size, engine)
    for name, file in written.items():
        if (new / name).stat().st_size != file.bytes:
            raise OSError(f"{name} has another size here than where it was written")
    for folder in (new, *(path for path in new.rglob("*") if path.is_dir())):
        sync_directory(folder)
    files.write_marker(new, written)
    if os.path.lexists(final):
        files.put_aside(final, "of this step, but no part of this run's past", say)
    os.rename(new, final)
    sync_directory(final.parent)
    write_text(final.parent / files.LATEST, final.name + "\n")
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
    state: files.RunState
    changed: list[str]
    is_reset: bool = False  # The optimizer is another one and begins with an empty state.


def read_compatible(folder: Path, config: RunConfig, world_size: int, fingerprint: str) -> Restored:
    """Read what a checkpoint says of itself.

    Raises UserError where it belongs to other data, another model or batch, or to a run in which
    other weights learn.
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
    if was.trains_all != now.trains_all:  # Moments would move weights that must stay, or not.
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
    """Fill model, optimizer and generators (a collective); raises as `Checkpoints.load`."""
    ranks, config = engine.ranks, engine.config

    def look() -> tuple[Restored, optimizer_state.StateIndex]:
        restored = read_compatible(folder, config, ranks.world_size, fingerprint)
        # Before the moments, which lie flat and could not say what shape is stored.
        optimizer_state.check_weights(engine, folder / files.WEIGHTS)
        if restored.is_reset:
            return restored, optimizer_state.StateIndex(0, {})
        return restored, optimizer_state.read_index(
            folder / "state", restored.state.world_size, engine
        )

    # The first rank alone reads what is the same for all, which many nodes would read slowly.
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
