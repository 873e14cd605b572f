"""The registry of callbacks and the keys that choose one: what is refused, and how."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from cat_lm import callbacks
from cat_lm.callbacks import Callback, CallbackKind
from cat_lm.config import load_config
from cat_lm.core.errors import SharedError, UserError
from cat_lm.training.callbacks import wandb
from cat_lm.training.callbacks.profile import StepProfile
from cat_lm.training.checkpoint.callback_state import (
    open_state,
    to_stored_state,
    write_callback_states,
)
from cat_lm.training.events import Callbacks
from tests.runs import run_values, write_config


@pytest.fixture
def registry(monkeypatch):
    """Takes away again what a test registers."""
    monkeypatch.setattr(
        callbacks.CALLBACKS, "_entries", dict(callbacks.CALLBACKS._entries), raising=True
    )


REFUSED = (
    ("train.ema_decay=1", "train.ema_decay=1: must be"),
    ("train.ema_decay=0", "train.ema_decay=0: must be"),
    ("train.ema_decay=often", "train.ema_decay='often': must be"),
    ("train.profile_steps=[9, 3]", "train.profile_steps=[9, 3]: the first step is after the last"),
    ("train.profile_steps=[0, 3]", "train.profile_steps=0: must be"),
    ("train.callbacks={heartbit: {}}", "train.callbacks='heartbit': must be one of ema, profile"),
    ("train.callbacks={ema: {}}", "train.callbacks: ema is chosen by train.ema_decay instead"),
    ("validation.sets={a b: c}", "validation.sets='a b': must be a name of letters, digits"),
    ("validation.tasks_rows=3", "validation.tasks_rows: has no effect without validation.tasks"),
    ("logging.wandb_group=g", "logging.wandb_group: has no effect without logging.wandb_project"),
    ("logging.wandb_tags=[a]", "logging.wandb_tags: has no effect without logging.wandb_project"),
)


@pytest.mark.parametrize("override", ["train.zero_stage=3", "train.sequence_parallel=2"])
def test_tasks_need_a_whole_model_on_each_rank(override, tmp_path):
    path = write_config(tmp_path, run_values("data", tmp_path))
    with pytest.raises(UserError, match=r"validation\.tasks: each rank must hold"):
        load_config(path, ["validation.tasks=[piqa]", override])


@pytest.mark.parametrize(("override", "said"), REFUSED)
def test_wrong_value_raises_user_error(override, said, tmp_path):
    path = write_config(tmp_path, run_values("data", tmp_path))
    with pytest.raises(UserError) as raised:
        load_config(path, [override])
    assert said in str(raised.value) and "\n" not in str(raised.value)


def kind(**attributes) -> CallbackKind:
    methods = {"name": "mine", "build": lambda self, options, run: None} | attributes
    return type("Mine", (CallbackKind,), methods)()


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"name": "../x"}, "its name must be of letters"),
        ({"name": "ema"}, "there is one of this name already"),
        ({"ranks": "some"}, "ranks is 'some'; must be 'all' or 'first'"),
        ({"Options": dict}, "its Options must be a frozen dataclass"),
        ({"build": CallbackKind.build}, "must define build"),
    ],
)
def test_callback_that_lacks_something_is_refused(attributes, said, registry):
    with pytest.raises(ValueError, match=said):
        callbacks.register(kind(**attributes))


def test_unknown_option_of_a_callback_is_refused(registry, tmp_path):
    callbacks.register(kind())
    path = write_config(tmp_path, run_values("data", tmp_path))
    with pytest.raises(UserError, match=r"train.callbacks: mine: unknown option 'a'"):
        load_config(path, ["train.callbacks={mine: {a: 1}}"])
    assert load_config(path, ["train.callbacks={mine: {}}"]).train.callbacks == {"mine": {}}


class Failing(Callback):
    """Fail in a step, and ask for a rest before every one."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def waits(self, step):
        return True

    def step(self, step):
        raise self.error


@pytest.mark.parametrize("collective", [True, False])
@pytest.mark.parametrize("error", [OSError("gone"), SharedError("gone")])
def test_error_of_one_rank_does_not_leave_it_among_collectives(
    error, collective, registry, tmp_path
):
    """Unless all ranks have the error, or no rank of the callback waits for another one."""
    made = {"build": lambda self, options, run: Failing(error), "collective": collective}
    callbacks.register(kind(**made))
    path = write_config(tmp_path, run_values("data", tmp_path))
    config = load_config(path, ["train.callbacks={mine: {}}"])
    ranks = SimpleNamespace(world_size=2, is_first=True, on_all_ranks=lambda action: action())
    run = SimpleNamespace(config=config, ranks=ranks)
    found = Callbacks(run)
    if collective and not isinstance(error, SharedError):
        with pytest.raises(UserError, match=r"callback mine: step: .*gone"):
            found.step(1)
    else:
        found.step(1)
        assert "gone" in str(found.error)
    assert found.wait_for(2), "ranks where it did not fail answer so, too"


def test_state_is_what_was_stored_and_other_things_are_refused(tmp_path):
    state = {"a": torch.arange(6.0).view(2, 3).T, "b": [1, None, "x"], "c": torch.tensor(True)}
    ((path, _),) = write_callback_states(tmp_path, {"mine": to_stored_state(state)})
    with open_state(path) as found:
        assert found["b"] == state["b"] and sorted(found) == ["a", "b", "c"]
        assert all(found[key].equal(state[key]) for key in "ac")
    for wrong in ([1], {1: 2}, {"a": {1, 2}}, {"a": float("nan")}):
        with pytest.raises(UserError, match="state"):
            to_stored_state(wrong)


def test_memory_of_a_gpu_is_traced_too(monkeypatch, tmp_path):
    """With torch's calls in the place of a GPU: recording stops, and what it found is written."""
    calls = mock.Mock()
    calls.dump.side_effect = lambda path: Path(path).write_text("snapshot")
    monkeypatch.setattr(torch.cuda, "synchronize", calls.synchronize)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", calls.record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", calls.dump)
    config = load_config(
        write_config(tmp_path, run_values("data", tmp_path)), ["train.profile_steps=[2, 2]"]
    )
    ranks, said = SimpleNamespace(device=torch.device("cuda")), []
    for _ in range(2):  # The second launch traces the same step again.
        callback = StepProfile(
            SimpleNamespace(config=config, ranks=ranks, folder=tmp_path, log=said.append)
        )
        callback.launch(0)
        assert not calls.record.called or len(said) == 2
        for step in (1, 2, 3):
            callback.step(step)
        callback.end(3, 0)
    assert calls.record.mock_calls == [mock.call(), mock.call(enabled=None)] * 2
    names = sorted(path.name for path in (tmp_path / "profile").iterdir())
    endings = ("memory.pickle", "trace.json.gz")
    assert names == sorted(f"steps-2-2{n}.{ending}" for n in ("", "-2") for ending in endings)


def test_keys_of_weights_and_biases_reach_it(monkeypatch, tmp_path):
    """Its server is not asked: what it was given is compared."""
    given, logged = {}, []
    tracked = SimpleNamespace(log=lambda numbers, step: logged.append((step, numbers)))
    fake = SimpleNamespace(init=lambda **keys: given.update(keys) or tracked)
    monkeypatch.setitem(__import__("sys").modules, "wandb", fake)
    values = run_values("data", tmp_path)
    keys = {"wandb_project": "p", "wandb_entity": "e", "wandb_group": "g", "wandb_name": "n"}
    values["logging"] |= keys | {"wandb_tags": ["a", "b"]}
    config = load_config(write_config(tmp_path, values))
    callback = wandb.WandbRun(SimpleNamespace(config=config, folder=tmp_path))
    callback.launch(0)
    callback.record({"step": 3, "loss": 1.5, "lr": float("inf")})
    assert logged == [(3, {"loss": 1.5})]
    found = {key: given[key] for key in ("project", "entity", "group", "tags", "name")}
    assert found == dict(project="p", entity="e", group="g", tags=["a", "b"], name="n")
    assert given["id"] == (tmp_path / "wandb_id").read_text()
