"""Hand the events of a run to its callbacks; keep their states, and the first error."""

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
    opened_state,
    storable,
    stored_states,
)


class Callbacks:
    """The callbacks of a run on this rank, in the order of their names in the registry.

    One that raises is called no more, but at the end; its error ends the run after the next
    checkpoint, which `error` asks for and `check` makes known. Where other ranks may wait for it in
    a collective, the error is raised at once.
    """

    def __init__(self, run: Run) -> None:
        """Make what the configuration asks for (a collective). Raises UserError on all ranks."""
        self._run = run
        self.error: UserError | None = None
        self._failed: set[str] = set()
        self._has_begun = False
        self._shared: set[str] = set()  # The names of those on all ranks.
        self._collective: set[str] = set()  # The names of those that hold collectives.
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
                callbacks[kind.name] = self._made(kind, options)
        return callbacks

    def _made(self, kind: CallbackKind, options: Any) -> Callback:
        try:
            callback = kind.build(options, self._run)
        except Exception as error:
            raise _described(kind.name, "build", error) from error
        if not isinstance(callback, Callback):
            raise UserError(f"callback {kind.name}: build must return a Callback, not {callback!r}")
        return callback

    def wait_for(self, step: int) -> bool:
        """Return True if a callback needs the numbers of this step recorded before its own turn.

        All ranks must answer alike. So those of the first rank alone are not asked, and one that
        has failed on a single rank is asked on every rank.
        """
        waiting = False
        for name in self._shared:
            try:
                waiting |= self._callbacks[name].waits(step)
            except Exception as error:  # A plugin's code may raise anything.
                raise _described(name, "waits", error) from error
        return waiting

    def launch(self, step: int) -> None:
        self._has_begun = True
        self._each("launch", lambda callback: callback.launch(step))
        self.check()

    def step(self, step: int) -> None:
        self._each("step", lambda callback: callback.step(step))

    def record(self, record: dict[str, Any]) -> None:
        self._each("record", lambda callback: callback.record(record))

    def validation(self, step: int, results: dict[str, float]) -> None:
        self._agree()
        self._each("validation", lambda callback: callback.validation(step, results))

    def checkpoint(self, step: int, folder: Path) -> None:
        self._agree()
        self._each("checkpoint", lambda callback: callback.checkpoint(step, folder))

    def end(self, step: int, exit_code: int) -> None:
        """Let every callback finish, also one that has failed."""
        if self._has_begun:
            self._failed.clear()
            self._each("end", lambda callback: callback.end(step, exit_code))

    def _agree(self) -> None:
        """Call what has failed on one rank on none, as others would wait for it in a collective."""
        if self._shared:
            self._failed = set().union(*self._run.ranks.gather(self._failed))

    def check(self, left: Callable[[], str] | None = None) -> None:
        """Raise the first error of any rank, on all of them (a collective).

        `left` describes the checkpoints that there are when a run ends by it.
        """

        def raise_error() -> None:
            if self.error is not None:
                raise type(self.error)(f"{self.error}; {left()}") if left else self.error

        self._run.ranks.on_all_ranks(raise_error)

    def states(self) -> dict[str, CallbackState]:
        """Return what a checkpoint must hold of each callback, on the first rank (a collective).

        Also of one that has failed; but one whose state cannot be had begins again where the run is
        resumed.
        """
        failed, self._failed = self._failed, set()
        states = dict(
            zip(self._callbacks, self._each("state", lambda c: storable(c.state())), strict=True)
        )
        self._failed |= failed
        return {name: state for name, state in states.items() if state and state != EMPTY}

    def restore(self, checkpoint: Path) -> None:
        """Give each callback the state that a step folder holds of it; log which have none there.

        Raises UserError on all ranks (a collective).
        """

        def read() -> None:
            stored = stored_states(checkpoint)
            for name, callback in self._callbacks.items():
                if name in stored:
                    with opened_state(stored[name]) as state:
                        self._act(name, "restore", lambda c, s=state: c.restore(s))
                elif type(callback).state is not Callback.state:
                    self._run.log(
                        f"callback {name}: {checkpoint} has no state of it; it begins now"
                    )

        self._run.ranks.on_all_ranks(read)
        self.check()

    def _each(self, event: str, action: Callable[[Callback], Any]) -> list[Any]:
        return [self._act(name, event, action) for name in self._callbacks]

    def _act(self, name: str, event: str, action: Callable[[Callback], Any]) -> Any:
        if name in self._failed:
            return None
        try:
            return action(self._callbacks[name])
        except Exception as error:  # A plugin's code may raise anything.
            described = _described(name, event, error)
            if name in self._collective and not isinstance(error, SharedError):
                raise described from error  # Other ranks may be waiting in a collective.
            self._failed.add(name)
            self.error = self.error or described
            return None


def _described(name: str, event: str, error: Exception) -> UserError:
    said = (
        str(error) if isinstance(error, UserError) else f"{event}: {describe_plugin_error(error)}"
    )
    kind = TemporaryError if is_temporary(error) else UserError
    return kind(f"callback {name}: {said}")
