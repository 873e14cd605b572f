"""Callbacks in whole runs: the order of events, states in checkpoints, errors, and the built-in."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cat_lm import callbacks
from cat_lm.callbacks import Callback, CallbackKind
from cat_lm.core.errors import REQUEUE_EXIT_CODE
from cat_lm.training.checkpoint import complete_checkpoints
from tests.distributed.ranks import run_on_ranks
from tests.distributed.trainers import TERM, error_of, train
from tests.prepared_data import random_documents, write_prepared
from tests.runs import losses, records, run_values


@dataclass(frozen=True)
class Options:
    fails_after: int = 0


class Listening(CallbackKind):
    """Note what a run does; fail in a step of the last rank if asked to."""

    name = "listening"
    Options = Options

    def __init__(self, heard: list) -> None:
        self.heard = heard

    def build(self, options: Options, run) -> Callback:
        return Listener(self.heard, options.fails_after, run.ranks)


class Listener(Callback):
    def __init__(self, heard: list, fails_after: int, ranks) -> None:
        self.heard, self.fails_after, self.ranks, self.steps = heard, fails_after, ranks, 0

    def launch(self, step):
        self.heard.append(("launch", step))

    def step(self, step):
        self.steps += 1
        self.heard.append(("step", step))
        if step == self.fails_after and self.ranks.rank == self.ranks.world_size - 1:
            raise ValueError("heard too much")

    def record(self, record):
        self.heard.append(("val" if "val_loss" in record else "record", record["step"]))

    def validation(self, step, results):
        self.heard.append(("validation", step))

    def checkpoint(self, step, folder):
        assert (folder / "complete.json").is_file()
        self.heard.append(("checkpoint", step))

    def end(self, step, exit_code):
        self.heard.append(("end", exit_code))

    def state(self):
        return {"steps": self.steps, "tensor": torch.tensor([self.steps])}

    def restore(self, state):
        self.steps = state["steps"]
        assert state["tensor"].tolist() == [self.steps] and len(state) == len(list(state)) == 2
        self.heard.append(("restore", self.steps))


class OfFirst(Listening):
    name, ranks = "of-first", "first"


def registered(kind: type = Listening) -> list:
    """What a callback that is registered from now on will hear."""
    heard: list = []
    callbacks.CALLBACKS._entries.pop(kind.name, None)
    callbacks.register(kind(heard))
    return heard


def heard_in_runs(ranks, data: str, folder: str) -> tuple[list, list, list[int]]:
    heard, of_first = registered(), registered(OfFirst)
    values = run_values(data, folder, max_steps=4, resume="auto")
    values["train"]["callbacks"] = {"listening": {}, "of-first": {}}
    values["validation"]["every_steps"] = values["checkpoint"]["every_steps"] = 2
    codes = [train(ranks, values, {2: TERM}), train(ranks, values)]
    return heard, of_first, codes


STEP = [[("record", step), ("step", step)] for step in range(5)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_events_come_in_order_and_states_are_restored(world_size, tiny_corpus, tmp_path):
    """The signal of one rank is followed at once, that of two a step later."""
    stop = 1 + world_size
    found = run_on_ranks(heard_in_runs, world_size, str(tiny_corpus), str(tmp_path))
    validated = [("validation", 2), ("val", 2)]
    rest = [*validated, ("checkpoint", 2)] if world_size == 2 else []
    last = [("validation", 4), ("val", 4), ("checkpoint", 4), ("end", 0)]
    first = [("launch", 0), *STEP[1], *STEP[2], *rest]
    first += STEP[3] if world_size == 2 else []
    first += [("checkpoint", stop), ("end", REQUEUE_EXIT_CODE)]
    left = [] if world_size == 2 else validated
    second = [("restore", stop), ("launch", stop), *left]
    second += [event for step in STEP[stop + 1 :] for event in step] + last
    for rank, (heard, of_first, codes) in enumerate(found):
        assert codes == [REQUEUE_EXIT_CODE, 0]
        assert heard == first + second
        assert of_first == ([] if rank else heard)


def failing(ranks, data: str, folder: str) -> list[str]:
    registered()
    values = run_values(data, folder, max_steps=8, resume="auto")
    values["train"]["callbacks"] = {"listening": {"fails_after": 3}}
    said = [error_of(ranks, values)]
    values["train"]["callbacks"]["listening"]["fails_after"] = 0
    return [*said, error_of(ranks, values)]


def test_callback_that_raises_ends_the_run_and_loses_nothing(tiny_corpus, tmp_path):
    found = run_on_ranks(failing, 2, str(tiny_corpus), str(tmp_path / "run"))
    assert found[0] == found[1]
    said, then = found[0]
    assert "callback listening: step: ValueError: heard too much (test_callbacks.py, line" in said
    assert "newest complete one: step-00000004" in said and "\n" not in said
    assert then == "finished"
    assert [row[0] for row in losses(tmp_path / "run") if len(row) == 3] == list(range(1, 9))


def averages(run: Path) -> dict[str, torch.Tensor]:
    return load_file(complete_checkpoints(run / "checkpoints")[-1] / "callbacks/ema.safetensors")


def weights(step: Path) -> dict[str, torch.Tensor]:
    return load_file(step / "model/model.safetensors")


def averaged(ranks, data: str, folder: str, stage: int, precision: str) -> None:
    how = {"zero_stage": stage, "precision": precision, "max_steps": 6, "resume": "auto"}
    for name, signals in (("straight", [{}]), ("killed", [{2: TERM}, {}]), ("plain", [{}])):
        values = run_values(data, Path(folder) / name, **how)
        values["checkpoint"] |= {"every_steps": 1, "keep_last": 9}
        if name != "plain":
            values["train"]["ema_decay"] = 0.8
        for sent in signals:
            train(ranks, values, sent)


@pytest.mark.parametrize(
    ("stage", "precision"),
    [(0, "fp32"), (1, "bf16"), *(pytest.param(s, "bf16", marks=pytest.mark.long) for s in (2, 3))],
)
def test_average_of_weights_is_exact_and_changes_nothing(stage, precision, tiny_corpus, tmp_path):
    run_on_ranks(averaged, 2, str(tiny_corpus), str(tmp_path), stage, precision)
    assert losses(tmp_path / "straight") == losses(tmp_path / "plain")
    found, again = averages(tmp_path / "straight"), averages(tmp_path / "killed")
    assert found.keys() == weights(complete_checkpoints(tmp_path / "plain/checkpoints")[0]).keys()
    steps = complete_checkpoints(tmp_path / "straight/checkpoints")
    before = load_file(steps[0] / "callbacks/ema.safetensors")
    assert [step.name[-1] for step in steps] == list("123456")
    for name, average in found.items():
        assert average.dtype == torch.float32 and torch.equal(average, again[name]), name
        wanted = before[name].double()
        for step in steps[1:]:
            wanted = 0.8 * wanted + 0.2 * weights(step)[name].double()
        torch.testing.assert_close(average.double(), wanted, rtol=1e-5, atol=1e-7)


def elastic(ranks, data: str, folder: str, last: int, stage: int) -> None:
    values = run_values(data, folder, resume="auto", max_steps=last, zero_stage=stage)
    values["train"]["ema_decay"] = 0.8
    values["checkpoint"] |= {"every_steps": 1, "keep_last": 9}
    train(ranks, values)


def test_average_goes_on_with_other_ranks_and_another_stage(tiny_corpus, tmp_path):
    for world_size, last, stage in ((2, 2, 1), (1, 3, 0)):
        run_on_ranks(elastic, world_size, str(tiny_corpus), str(tmp_path), last, stage)
    before, after = complete_checkpoints(tmp_path / "checkpoints")[-2:]
    averages_before, now = load_file(before / "callbacks/ema.safetensors"), weights(after)
    for name, average in averages(tmp_path).items():
        wanted = 0.8 * averages_before[name].double() + 0.2 * now[name].double()
        torch.testing.assert_close(average.double(), wanted, rtol=1e-6, atol=1e-8)


def scored(ranks, data: str, folder: str) -> None:
    for name, sets in (("plain", {}), ("sets", {"same": data, "again": data})):
        values = run_values(data, Path(folder) / name, max_steps=4)
        values["validation"] |= {"every_steps": 2, "sets": sets}
        values["logging"] = {"tensorboard": True}
        train(ranks, values)


def test_named_validation_sets_have_metrics_and_lines_of_their_own(tiny_corpus, tmp_path):
    """A set of the same data has the same numbers; the run's own are what they were."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_on_ranks(scored, 2, str(tiny_corpus), str(tmp_path))
    assert losses(tmp_path / "sets") == losses(tmp_path / "plain")
    found = [record for record in records(tmp_path / "sets") if "val_loss" in record]
    for record in found:
        for metric in ("val_loss", "val_perplexity", "val_bits_per_byte"):
            assert record[f"{metric}/same"] == record[f"{metric}/again"] == record[metric]
    assert [record["step"] for record in found] == [2, 4]
    log = (tmp_path / "sets/train.log").read_text()
    for words in ("validation loss", "validation loss of same", "validation loss of again"):
        assert f"step 4: {words} {found[-1]['val_loss']:.4f}, perplexity" in log
    events = EventAccumulator(str(tmp_path / "sets/tensorboard")).Reload()
    assert "validation/val_loss/same" in events.Tags()["scalars"]


def refused(ranks, data: str, folder: str, sets: dict[str, str]) -> list[str]:
    found = []
    for name, other in sets.items():
        values = run_values(data, Path(folder) / name)
        values["validation"]["sets"] = {name: other}
        found.append(error_of(ranks, values))
    return found


def test_validation_sets_that_do_not_fit_are_refused(tiny_corpus, tmp_path):
    other = write_prepared(tmp_path / "other", random_documents(9, 30), tokenizer="another")
    sets = {"other": str(other), "gone": str(tmp_path / "gone")}
    folders = (str(tiny_corpus), str(tmp_path / "runs"))
    (tokenizer, gone), same = run_on_ranks(refused, 2, *folders, sets)
    assert [tokenizer, gone] == same
    assert "callback validation_sets: validation.sets: other=" in tokenizer
    assert "was prepared with the tokenizer" in tokenizer and f"{sets['gone']}" in gone


def traced(ranks, data: str, folder: str) -> list[int]:
    values = run_values(data, folder, max_steps=5, resume="auto", profile_steps=[2, 4])
    return [train(ranks, values, {3: TERM}), train(ranks, values)]


def test_steps_are_traced_into_the_runs_folder(tiny_corpus, tmp_path):
    """Also where a signal ends the run within them; the next launch traces those that are left."""
    assert run_on_ranks(traced, 1, str(tiny_corpus), str(tmp_path)) == [[REQUEUE_EXIT_CODE, 0]]
    names = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert names == ["steps-2-3.trace.json.gz", "steps-4-4.trace.json.gz"]
    for name in names:
        with gzip.open(tmp_path / "profile" / name) as stream:
            events: list[dict[str, Any]] = json.load(stream)["traceEvents"]
        assert any("addmm" in event.get("name", "") for event in events)
