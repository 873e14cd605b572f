"""train.py's Trainer inside a test's process, with what `main` gives it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cat_lm.config import RunConfig
from cat_lm.training.watchdog import StopSignal, Watchdog


@contextmanager
def opened(kind: type, ranks, values: dict[str, Any]) -> Iterator[Any]:
    """A trainer of class `kind`, a subclass of Trainer; leaving it frees what its process held."""
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
