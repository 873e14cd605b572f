"""train.py's Trainer inside a test's process, with what `main` gives it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cat_lm.config import RunConfig
from cat_lm.core.errors import UserError
from cat_lm.training.watchdog import StopSignal, Watchdog


@contextmanager
def opened(kind: type, ranks, values: dict[str, Any]) -> Iterator[Any]:
    """Make a trainer of class `kind`; leaving it frees what its process held."""
    config = RunConfig.model_validate(values)
    watchdog = Watchdog(config.train.hang_minutes)
    try:
        trainer = kind(config, ranks, StopSignal(), watchdog)
        try:
            yield trainer
        finally:
            trainer.checkpoints.close()
    finally:
        watchdog.close()


def train(
    ranks,
    values: dict[str, Any],
    signals: dict[int, int] | None = None,
    prepare: Callable[[Any], object] | None = None,
) -> int:
    """Run a trainer and return its exit code.

    Args:
        signals: what the last rank alone gets after a step, by the step's number.
        prepare: gets the trainer before it runs.
    """
    from train import Trainer

    with opened(Trainer, ranks, values) as trainer:

        def tell() -> None:
            number = (signals or {}).get(trainer.step)
            if number and ranks.rank == ranks.world_size - 1:
                os.kill(os.getpid(), number)

        after(trainer, "train_step", tell)
        if prepare is not None:
            prepare(trainer)
        return trainer.run()


def after(owner: Any, name: str, action: Callable[[], object]) -> None:
    """Call `action` after each call of a method of one object."""
    original = getattr(owner, name)

    def followed(*given: Any, **named: Any) -> Any:
        result = original(*given, **named)
        action()
        return result

    setattr(owner, name, followed)


def error_of(ranks, values: dict[str, Any], **how: Any) -> str:
    """Return the line that a run ends with, or "finished"."""
    try:
        assert train(ranks, values, **how) == 0
    except UserError as error:
        return str(error)
    return "finished"


TERM = signal.SIGTERM
