"""Every callback of the project, and what `check_entry` finds in others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from cat_lm import callbacks
from cat_lm.callbacks import Callback, CallbackKind
from cat_lm.testing import check_entry

KEYS: dict[str, dict[str, Any]] = {
    "ema": {"train.ema_decay": 0.9},
    "profile": {"train.profile_steps": [2, 3]},
    "tensorboard": {"logging.tensorboard": True},
}
# These score or send to a server: whole runs are in tests/distributed and tests/cat_lm.
IN_RUNS = {"tasks", "validation_sets", "wandb"}


@pytest.mark.parametrize("name", callbacks.CALLBACKS.own_names())
def test_callbacks_of_the_project_pass(name):
    if name not in IN_RUNS:
        check_entry(callbacks.get(name), KEYS[name])


@dataclass(frozen=True)
class Options:
    size: int = 3


class Counting(Callback):
    """Hold a number and a tensor, and keep both."""

    def __init__(self, options: Options, run: callbacks.Run) -> None:
        self.run, self.count, self.total = run, 0, torch.zeros(options.size)

    def step(self, step):
        self.count += 1
        self.total += step

    def validation(self, step, results):
        results["count/steps"] = self.count

    def state(self):
        return {"count": self.count, "total": self.total}

    def restore(self, state):
        self.count, self.total = state["count"], state["total"].clone()


def counting(**methods: Any) -> CallbackKind:
    """Register a callback, sound but for its `methods`."""

    class Kind(CallbackKind):
        name = "counting"
        Options: ClassVar[type] = Options

        def build(self, options, run):
            return type("Other", (Counting,), methods)(options, run)

    kind = Kind()
    callbacks.register(kind)
    return kind


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Takes away again what a test registers."""
    monkeypatch.setattr(callbacks.CALLBACKS, "_entries", dict(callbacks.CALLBACKS._entries))


def test_sound_callback_passes():
    check_entry(counting(), {"size": 4})


def restore_total(callback, state):
    callback.total = state["total"].clone()


def restore_count(callback, state):
    callback.count = state["count"]


def move(callback, step):
    next(callback.run.engine.model.parameters()).add_(1)


WRONG = {
    "step draws from torch's generator": {"step": lambda self, step: torch.randn(1)},
    "step changes weights": {"step": move},
    "step raises ZeroDivisionError: division by zero (test_callbacks.py": {
        "step": lambda self, step: 1 / 0
    },
    "launch raises TypeError": {"launch": lambda self: None},
    "has the state": {"restore": restore_total},
    "has another total in its state": {"restore": restore_count},
    "adds val_loss=2.0 to results": {
        "validation": lambda self, step, results: results.update(val_loss=2.0)
    },
    "adds count/steps='many'": {
        "validation": lambda self, step, results: results.update({"count/steps": "many"})
    },
    "records {'step': 1, 'count': 1}": {
        "step": lambda self, step: self.run.record({"step": 1, "count": 1})
    },
    "its state cannot be stored": {"state": lambda self: {"a": object()}},
}


@pytest.mark.parametrize("said", WRONG)
def test_wrong_callback_is_found(said):
    with pytest.raises(AssertionError) as raised:
        check_entry(counting(**WRONG[said]))
    assert str(raised.value).startswith("callback 'counting': ") and said in str(raised.value)
