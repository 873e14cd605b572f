"""The checkpoints of one run: which to go on from, saving, pruning and restoring them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm.config import RunConfig
from cat_lm.core.errors import SharedError, UserError, describe_os_error, is_temporary, shared_error
from cat_lm.core.folders import Busy, Lock, hold, own_name, remove_temporary
from cat_lm.training.checkpoint import files, transfer
from cat_lm.training.checkpoint.files import (
    Say,
    Unreadable,
    lies_in,
    read_marker,
    silent,
    step_folders,
    step_of,
)
from cat_lm.training.checkpoint.verify import Verifier, candidates, newest_whole

if TYPE_CHECKING:
    from cat_lm.training.distributed import Ranks
    from cat_lm.training.engine import Engine


class Checkpoints:
    """Saves, prunes and restores the checkpoints of one run.

    Args:
        say: takes the lines for the run's log.
        progress: told what was done, each time that some of a long action is.
    """

    def __init__(
        self,
        run_folder: Path,
        config: RunConfig,
        ranks: Ranks,
        say: Say = silent,
        progress: Callable[[str], object] = silent,
    ) -> None:
        self.folder = run_folder / "checkpoints"
        self.config, self.ranks = config, ranks
        self._say, self._progress = say, progress
        self._current: Path | None = None  # saved or loaded last by this process
        self._older: list[Path] = []  # candidates before the one that was chosen, newest first
        self._verifier = Verifier(ranks, progress)
        self._lock = ranks.on_rank_zero(self._open)

    def _open(self) -> Lock:
        """Make the folder, for this process alone.

        The lock ends with the process, however it ends.
        """
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

    @property
    def _alone(self) -> bool:
        """Return True if the lock, which the first rank has, keeps other processes out."""
        return self._lock is not None and self._lock.error is None

    def close(self) -> None:
        """Let another process train in the folder; nothing of it is read any more."""
        self._verifier.stop()
        if self._lock:
            self._lock.close()

    @property
    def newest_step(self) -> int | None:
        """The step of the checkpoint that this process saved or loaded last."""
        return None if self._current is None else step_of(self._current)

    @property
    def recorded_step(self) -> int:
        """The step up to which the folder's records are this run's past.

        0 where it begins with nothing, or with a checkpoint of another folder: what is recorded
        here is then another run's, or of an attempt that a kill ended before its first checkpoint.
        """
        is_own = self._current is not None and lies_in(self._current, self.folder)
        return step_of(self._current) if is_own else 0

    def describe_left(self) -> str:
        """Return which complete checkpoint a run can go on from."""
        return files.describe_left(self.folder)

    def to_resume(self) -> Path | None:
        """Choose the checkpoint that `train.resume` asks for (a collective).

        The newest whole one: each newer one has a line that says what is wrong with it. Large files
        are read in threads meanwhile; `load` waits for what they find and may choose an older one.

        Raises:
            UserError: a checkpoint was named and is not whole; or the run's folder has checkpoints
                that a start from there would mix with its own, or, with `auto`, none that is whole.
        """
        ranks = self.ranks
        ranks.on_rank_zero(self._tidy)
        found = ranks.broadcast(ranks.on_rank_zero(self._candidates))
        if not found:
            ranks.on_rank_zero(lambda: self._check_mixture(None))
            ranks.on_rank_zero(lambda: files.set_aside_useless(self.folder, None, self._say))
            return None
        start = self._newest(found, self._verifier.look)
        ranks.on_rank_zero(lambda: self._check_mixture(start))
        self._verifier.begin(start)
        return start

    def _tidy(self) -> None:
        files.clear_leftovers(self.folder, self._say, self._alone)

    def _newest(self, found: list[Path], damage: Callable[[Path], str | None]) -> Path:
        """Take the newest whole one, and remember those before it."""
        try:
            start = newest_whole(found, damage, self._say)
        except UserError as error:
            raise shared_error(f"{error}{self._advice()}", is_temporary(error)) from None
        self._older = found[found.index(start) + 1 :]
        return start

    def _advice(self) -> str:
        if self.config.train.resume != "auto":
            return ""
        return "; put it back from a copy, or start anew in another train.output_dir"

    def _candidates(self) -> list[Path]:
        wish = self.config.train.resume
        if wish == "never":
            return []
        return step_folders(self.folder)[::-1] if wish == "auto" else candidates(wish)

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
        """Restore model, optimizer and generators (a collective) from what `to_resume` chose.

        Or from an older one, where a large file turns out not to be as it was saved: `folder` of
        the result says which. Then what cannot be gone on from is set aside.

        Settings that do not make it another run (rates, decay, lengths, ZeRO stage) are the
        configuration's; `changed` lists them, and another number of ranks, as lines for the log.

        Raises:
            UserError: the checkpoint belongs to other data, another model or batch, or is damaged;
                on every rank.
        """
        try:
            restored = self._restore_whole(folder, engine, fingerprint)
        except BaseException:
            self.close()  # what is not continued holds nobody back
            raise
        folder = restored.folder
        self.ranks.on_rank_zero(lambda: files.set_aside_useless(self.folder, folder, self._say))
        self._current = folder
        return restored

    def _restore_whole(self, folder: Path, engine: Engine, fingerprint: str) -> transfer.Restored:
        """Restore `folder`, or what was saved before it where its files are not as they were."""
        restored = None
        with contextlib.suppress(UserError):  # may be for what the verifier finds
            restored = transfer.restore(engine, folder, fingerprint)
        problem = self._verifier.read(folder)
        if problem is None:
            # All of it was read meanwhile: what could not be read for a moment now can.
            return restored or transfer.restore(engine, folder, fingerprint)
        if not self._older:
            raise SharedError(f"{folder}: is not a complete checkpoint: {problem}{self._advice()}")
        self._say(f"{folder}: passed over: {problem}")
        older = self._newest(self._older, self._verifier.read)
        return transfer.restore(engine, older, fingerprint)

    def _not_finite(self, engine: Engine) -> str:
        """Name the tensors that are not finite on any rank; empty where all are (a collective)."""
        from cat_lm.training.checkpoint.optimizer_state import not_finite

        names = sorted(set().union(*self.ranks.gather(not_finite(engine))))
        if not names:
            return ""
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"{', '.join(names[:3])}{more}: not finite"

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
        final = self.folder / f"step-{state['step']:08d}"
        if final == self._current:
            return final
        if found := self._not_finite(engine):
            raise SharedError(
                f"step {state['step']}: {found}; no checkpoint is made of it; "
                f"{self.describe_left()}; a lower optimizer.lr may help"
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
        from cat_lm.training.checkpoint import buffers
        from cat_lm.training.checkpoint.optimizer_state import full_precision_weights

        ranks, progress = self.ranks, self._progress
        # Of the first rank, so that no other run, where there are no locks, has the same folder.
        temporary = ranks.broadcast(own_name(final, "saving"))
        new = temporary / final.name
        try:
            ranks.on_rank_zero(lambda: transfer.prepare(new))
            weights = full_precision_weights(engine) | buffers.to_save(engine.model, ranks)
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
    """Return True if a step folder is a checkpoint. Raises `Unreadable` where it may be one."""
    try:
        read_marker(folder)
    except Unreadable:
        raise
    except UserError:
        return False
    return True
