"""Call the callbacks of a run for its events; keep their states and the first error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cat_lm.callbacks import Callback, CallbackKind, Run, chosen
from cat_lm.core.errors import SharedError, TemporaryError, UserError, is_temporary
from cat_lm.core.registry import describe_plugin_error
from cat_lm.training.checkpoint.callback_state import (
    EMPTY,
    CallbackState,
    open_state,
    stored_states,
    to_stored_state,
)


class Callbacks:
    """The callbacks of a run on this rank, in the order of their names in the registry.

    A callback that raises is not called again, except for `end`. Its error is kept in `error`; the
    run then saves a checkpoint, and `check` raises the error on all ranks. The error of a callback
    with collectives is raised at once, because other ranks may be waiting for it.
    """

    def __init__(self, run: Run) -> None:
        """Build the configured callbacks (a collective). Raises UserError on all ranks."""
        self._run = run
        self.error: UserError | None = None
        self._failed: set[str] = set()
        self._has_begun = False
        self._shared: set[str] = set()  # names of the callbacks that are on all ranks
        self._collective: set[str] = set()  # names of the callbacks that use collectives
        self._callbacks: dict[str, Callback] = run.ranks.on_all_ranks(self._build)
        self.has_shared = bool(self._shared)

    def _build(self) -> dict[str, Callback]:
        callbacks = {}
        for kind, options in chosen(self._run.config):
            if kind.ranks == "all":
                self._shared.add(kind.name)
            if kind.collective and self._run.ranks.world_size > 1:
                self._collective.add(kind.name)
            if kind.ranks == "all" or self._run.ranks.is_first:
                callbacks[kind.name] = self._build_callback(kind, options)
        return callbacks

    def _build_callback(self, kind: CallbackKind, options: Any) -> Callback:
        try:
            callback = kind.build(options, self._run)
        except Exception as error:
            raise _callback_error(kind.name, "build", error) from error
        if not isinstance(callback, Callback):
            raise UserError(f"callback {kind.name}: build must return a Callback, not {callback!r}")
        return callback

    def wait_for(self, step: int) -> bool:
        """Return True if a callback needs the numbers of this step recorded before it is called.

        All ranks must return the same. Callbacks of rank 0 only are therefore not asked, and one
        that has failed on some rank is still asked on every rank.
        """
        waiting = False
        for name in self._shared:
            try:
                waiting |= self._callbacks[name].waits(step)
            except Exception as error:  # A plugin's code may raise anything.
                raise _callback_error(name, "waits", error) from error
        return waiting

    def launch(self, step: int) -> None:
        self._has_begun = True
        self._call_all("launch", lambda callback: callback.launch(step))
        self.check()

    def step(self, step: int) -> None:
        self._call_all("step", lambda callback: callback.step(step))

    def record(self, record: dict[str, Any]) -> None:
        self._call_all("record", lambda callback: callback.record(record))

    def validation(self, step: int, results: dict[str, float]) -> None:
        self._share_failures()
        self._call_all("validation", lambda callback: callback.validation(step, results))

    def checkpoint(self, step: int, folder: Path) -> None:
        self._share_failures()
        self._call_all("checkpoint", lambda callback: callback.checkpoint(step, folder))

    def end(self, step: int, exit_code: int) -> None:
        """Call `end` of every callback, including those that have failed."""
        if self._has_begun:
            self._failed.clear()
            self._call_all("end", lambda callback: callback.end(step, exit_code))

    def _share_failures(self) -> None:
        """Stop calling on all ranks what has failed on one, since collectives would hang."""
        if self._shared:
            self._failed = set().union(*self._run.ranks.gather(self._failed))

    def check(self, left: Callable[[], str] | None = None) -> None:
        """Raise the first error of any rank, on all of them (a collective).

        `left` describes the existing checkpoints, for the message that ends a run.
        """

        def raise_error() -> None:
            if self.error is not None:
                raise type(self.error)(f"{self.error}; {left()}") if left else self.error

        self._run.ranks.on_all_ranks(raise_error)

    def states(self) -> dict[str, CallbackState]:
        """Return the callbacks' states for a checkpoint, on rank 0 (a collective).

        Callbacks that have failed are included. One whose state raises is left out, and starts from
        scratch when the run is resumed.
        """
        failed, self._failed = self._failed, set()
        states = dict(
            zip(
                self._callbacks,
                self._call_all("state", lambda c: to_stored_state(c.state())),
                strict=True,
            )
        )
        self._failed |= failed
        return {name: state for name, state in states.items() if state and state != EMPTY}

    def restore(self, checkpoint: Path) -> None:
        """Restore the callbacks' states from a checkpoint; log which callbacks have none in it.

        It is a collective. Raises UserError on all ranks.
        """

        def read() -> None:
            stored = stored_states(checkpoint)
            for name, callback in self._callbacks.items():
                if name in stored:
                    with open_state(stored[name]) as state:
                        self._call(name, "restore", lambda c, s=state: c.restore(s))
                elif type(callback).state is not Callback.state:
                    self._run.log(
                        f"callback {name}: {checkpoint} has no state of it; it begins now"
                    )

        self._run.ranks.on_all_ranks(read)
        self.check()

    def _call_all(self, event: str, action: Callable[[Callback], Any]) -> list[Any]:
        return [self._call(name, event, action) for name in self._callbacks]

    def _call(self, name: str, event: str, action: Callable[[Callback], Any]) -> Any:
        if name in self._failed:
            return None
        try:
            return action(self._callbacks[name])
        except Exception as error:  # A plugin's code may raise anything.
            described = _callback_error(name, event, error)
            if name in self._collective and not isinstance(error, SharedError):
                raise described from error  # Other ranks may be waiting in a collective.
            self._failed.add(name)
            self.error = self.error or described
            return None


def _callback_error(name: str, event: str, error: Exception) -> UserError:
    said = (
        str(error) if isinstance(error, UserError) else f"{event}: {describe_plugin_error(error)}"
    )
    kind = TemporaryError if is_temporary(error) else UserError
    return kind(f"callback {name}: {said}")
