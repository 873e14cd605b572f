"""The checkpoints of one run: which to go on from, saving, pruning and restoring them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm.config import RunConfig
from cat_lm.core.errors import (
    SharedError,
    TemporaryError,
    UserError,
    describe_os_error,
    is_temporary,
    shared_error,
)
from cat_lm.core.folders import Busy, Lock, hold, own_name, remove_temporary
from cat_lm.training.checkpoint import files, transfer
from cat_lm.training.checkpoint.files import Say, lies_in, read_marker, step_folders, step_of

if TYPE_CHECKING:
    from cat_lm.training.distributed import Ranks
    from cat_lm.training.engine import Engine


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
            lock = hold(self.folder / ".lock", wait=False)
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
        """Let another process train in the folder."""
        if self._lock:
            self._lock.close()

    @property
    def newest_step(self) -> int | None:
        """The step of the checkpoint that this process saved or loaded last."""
        return None if self._current is None else step_of(self._current)

    @property
    def recorded_step(self) -> int:
        """The step up to which the folder's records are this run's past.

        0 where it begins with nothing, or with a checkpoint of another folder.
        """
        is_own = self._current is not None and lies_in(self._current, self.folder)
        return step_of(self._current) if is_own else 0

    def describe_left(self) -> str:
        """Return which complete checkpoint a run can go on from."""
        return files.describe_left(self.folder)

    def to_resume(self) -> Path | None:
        """Choose the checkpoint that `train.resume` asks for (a collective).

        The newest whole one, of which all files are compared with the marker, each rank its share:
        each newer one has a line that says what is wrong with it.

        Raises:
            UserError: a checkpoint was named and is not whole; or the run's folder has checkpoints
                that a start from there would mix with its own, or, with `auto`, none that is whole.
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
        return step_folders(self.folder)[::-1] if wish == "auto" else files.candidates(wish)

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
        own = next((path for path in step_folders(self.folder)[::-1] if _is_ours(path)), None)
        if own is None:
            return
        is_own = start is not None and lies_in(start, self.folder)
        if not is_own or step_of(own) > step_of(start):
            raise UserError(
                f"train.output_dir={self.config.train.output_dir}: already holds {own.name}; "
                "train.resume=auto goes on from the newest whole checkpoint, "
                "another train.output_dir starts anew"
            )

    def load(self, folder: Path, engine: Engine, fingerprint: str) -> transfer.Restored:
        """Restore model, optimizer and generators (a collective), and set later ones aside.

        Args:
            folder: what `to_resume` chose.

        Raises:
            UserError: the checkpoint belongs to other data, another model or batch, or is damaged;
                on every rank.
        """
        restored = transfer.restore(engine, folder, fingerprint)
        self.ranks.on_rank_zero(lambda: files.set_aside_later(self.folder, folder, self._say))
        self._current = folder
        return restored

    def save(
        self, engine: Engine, state: dict[str, Any], tokenizer: Path, *, prune: bool = True
    ) -> Path:
        """Save the state after `state["step"]` steps (a collective).

        Args:
            prune: delete the old ones that the configuration does not keep.

        Raises:
            SharedError: it could not be written, or weights or moments are not finite; older
                checkpoints are untouched.
            RuntimeError: a collective failed, most likely because another rank has ended.
        """
        from cat_lm.training.checkpoint.optimizer_state import not_finite

        final = self.folder / f"step-{state['step']:08d}"
        if final == self._current:
            return final
        if names := sorted(set().union(*self.ranks.gather(not_finite(engine)))):
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise SharedError(
                f"step {state['step']}: {', '.join(names[:3])}{more}: not finite; no checkpoint is "
                f"made of it; {self.describe_left()}; a lower optimizer.lr may help"
            )
        try:
            self._write(final, engine, state, tokenizer)
        except UserError as error:
            why = " ".join(str(error).split()) or type(error).__name__
            text = f"{final}: the checkpoint could not be written ({why}); {self.describe_left()}"
            raise shared_error(text, is_temporary(error)) from error
        self._current = final
        if prune:
            rule = self.config.checkpoint
            self.ranks.on_rank_zero(lambda: files.prune(self.folder, rule, final, self._say))
        return final

    def _write(self, final: Path, engine: Engine, state: dict[str, Any], tokenizer: Path) -> None:
        from cat_lm.training.checkpoint.optimizer_state import full_precision_weights

        ranks, progress = self.ranks, self._progress
        # Of the first rank, so that no other run, where there are no locks, has the same folder.
        temporary = ranks.broadcast(own_name(final, "saving"))
        new = temporary / final.name
        try:
            ranks.on_rank_zero(lambda: transfer.prepare(new))
            weights = full_precision_weights(engine)
            progress("gathering the weights")
            own = ranks.on_all_ranks(
                lambda: transfer.write_own_files(new, engine, weights, state, tokenizer, progress)
            )
            written = {name: file for part in ranks.gather(own) for name, file in part.items()}
            ranks.on_rank_zero(lambda: transfer.publish(new, final, written, engine, self._say))
        except UserError:
            if ranks.is_first:
                with contextlib.suppress(UserError, OSError):
                    remove_temporary(temporary)
            raise


def _is_ours(folder: Path) -> bool:
    """Return True if a step folder is a checkpoint. Raises TemporaryError where it may be one."""
    try:
        read_marker(folder)
    except TemporaryError:
        raise
    except UserError:
        return False
    return True
