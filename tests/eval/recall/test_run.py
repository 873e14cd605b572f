"""Cells: they learn, stop, are measured and kept, and one model's record is that of a stack."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest
import torch

from cat_lm.core.errors import UserError
from cat_lm.core.numbers import IGNORE_INDEX
from eval.lab import cell as cells
from eval.recall.cell import Cell
from eval.recall.measuring import measure, stack_of
from eval.recall.tasks import Examples
from tests.commands import python

SMALL = {"d_model": 32, "seq_len": 16, "test_examples": 200, "batch_size": 64}
SMALL["validation_examples"] = 100
TINY = SMALL | {"d_model": 8, "train_examples": 64, "epochs": 1}


def test_one_cat_layer_learns_recall_generalises_and_no_mixing_guesses():
    cell = Cell(
        task="mqar:vocab_size=64",
        mixer="cat",
        train_examples=64 * 200,
        epochs=8,
        test_lengths=(12, 64),
        fixed_items=True,
        **SMALL,
    )
    record = cell.run()
    assert record["accuracy"] > 0.99 and record["steps"] % 200 == 0
    assert set(record["tests"]) == {"trained length", "length 12", "length 64", "length 64, 4 keys"}
    assert record["tests"]["length 64"]["accuracy"] > 0.9
    (found,) = cell.derived(record)["delays"]
    assert found["k"][0] == found["q"][0] + found["v"][0] + 1
    plain = {"epochs": 1, "test_lengths": (), "fixed_items": False}
    control = dataclasses.replace(cell, mixer="none", **plain).run()
    assert control["accuracy"] < 0.15


def test_training_stops_where_it_is_told():
    cell = Cell("mqar:vocab_size=64", "none", train_examples=256, epochs=3, **SMALL)
    record = dataclasses.replace(cell, stop_above=0.0, eval_steps=2).run()
    assert record["steps"] <= 4 and record["history"][-1]["accuracy"] > 0
    whole = dataclasses.replace(cell, stop_above=None).run()
    assert whole["steps"] == 12 and [p["epoch"] for p in whole["history"]] == [1, 2, 3]


def test_the_optimizer_and_its_schedule_are_zoologys(monkeypatch):
    seen = []

    class Recorder(torch.optim.AdamW):
        def __init__(self, parameters, **settings):
            super().__init__(parameters, **settings)
            seen.append(settings)

        def step(self, closure=None):
            seen.append(self.param_groups[0]["lr"])
            return super().step(closure)

    monkeypatch.setattr("torch.optim.AdamW", Recorder)
    cell = Cell("mqar:vocab_size=64", "cat", train_examples=128, epochs=4, **SMALL)
    dataclasses.replace(cell, lr=0.02, stop_above=None).run()
    assert seen[0] == {"lr": 0.02, "weight_decay": 0.1, "fused": True}  # one kernel, the same rule
    cosine = [0.01 * (1 + np.cos(np.pi * epoch / 4)) for epoch in range(4) for _ in range(2)]
    assert seen[1:] == pytest.approx(cosine)
    assert [Cell("mqar", "cat", 8, n).rows for n in (64, 128, 256, 512, 1024)] == [
        *(512, 512, 256, 128, 64)
    ]


def test_a_cell_reports_its_groups_and_ceilings():
    cell = Cell(
        "hard-mqnar:vocab_size=64,pool=dense",
        "none",
        **TINY | {"seq_len": 30},
        test_lengths=(48,),
        fixed_items=True,
    )
    record = cell.run(quiet=True)
    tasks = cell.tests()
    assert list(tasks) == ["trained length", "length 48", "length 48, 5 keys"]
    for name, task in tasks.items():
        test = record["tests"][name]
        assert test["one_token_expected"] == task.one_token_expected
        assert test["one_token_ceiling"] == pytest.approx(task.one_token_expected, abs=0.06)
        parts = test["accuracy_shared"], test["accuracy_unshared"]
        assert min(parts) <= test["accuracy"] <= max(parts)
    plain = Cell("mqar:vocab_size=64", "none", **TINY).run()
    assert set(plain["tests"]["trained length"]) == {"seq_len", "accuracy", "rows_right"}


def oracle(table: list[int], spoilt: float | None = None):
    """Answer the token that a table has for what is fed; one logit of the last may be no number."""

    def answer(tokens, positions):
        wanted = torch.tensor(table)[tokens.gather(-1, positions)].flatten(-2)
        logits = torch.nn.functional.one_hot(wanted, len(table)).float()
        if spoilt is not None:
            logits[..., -1, 3] = spoilt
        return logits

    return answer


def test_accuracy_is_the_mean_over_rows_and_free_running_feeds_answers_back():
    # ⊥ = 5 is answered 1, 1 is answered 2, 2 is answered 4 (wrong: 3), 4 and 3 are answered 0.
    inputs = np.array([[0, 0, 5, 1, 2, 3]])
    labels = np.array([[IGNORE_INDEX, IGNORE_INDEX, 1, 2, 3, 4]])
    examples = Examples(np.repeat(inputs, 3, axis=0), np.repeat(labels, 3, axis=0))
    (found,) = measure(stack_of(oracle([0, 2, 4, 4, 0, 1])), [examples], 6, "cpu", runs_free=True)
    # Fed its own 4 in place of 3 it answers 0 where 4 was due.
    assert found == {
        **{"accuracy": 0.75, "rows_right": 0.0},
        **{"free_running_accuracy": 0.5, "free_running_rows_right": 0.0},
    }


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_whose_answers_are_no_numbers_is_not_one_that_is_wrong(value):
    """The likeliest of them is a token, which may even be the right one."""
    inputs = np.array([[0, 0, 5, 1], [0, 0, 5, 2]])
    labels = np.array([[IGNORE_INDEX, IGNORE_INDEX, 1, 2], [IGNORE_INDEX, IGNORE_INDEX, 1, 3]])
    groups = {"known": np.array([[True, False], [True, False]])}
    examples = Examples(inputs, labels, groups)
    both = [oracle([0, 2, 3, 4, 0, 1], spoilt) for spoilt in (None, value, None)]

    def answers(tokens, positions):  # in a stack only the one that diverged has none
        return torch.stack([m(t, p) for m, t, p in zip(both, tokens, positions, strict=True)])

    sound, lost, other = measure(answers, [examples] * 3, 6, "cpu", runs_free=True)
    assert set(lost.values()) == {-math.inf} and sound == other and lost.keys() == sound.keys()
    assert sound["accuracy"] == sound["accuracy_known"] == 1.0


@pytest.mark.parametrize("change", ["of another seed", "without steps"])
def test_a_record_of_something_else_is_refused(tmp_path, change):
    """Also with its seal intact: a copy of seed 0 is no seed 1."""
    cell = Cell("mqar:vocab_size=64", "none", **TINY)
    record = cells.run(tmp_path, cell, "cpu")
    if change == "without steps":
        del record["steps"]
    else:
        cell = dataclasses.replace(cell, seed=1)
    cells._store(tmp_path, cell).write(cells._name(cell), record)
    path = re.escape(str(cells.cell_path(tmp_path, cell)))
    with pytest.raises(UserError, match=f"{path}: (has no steps|damaged: is of .*); delete it"):
        cells.finished(tmp_path, cell)


def test_the_command_line(tmp_path):
    small = ("--d-model", 16, "--seq-len", 16, "--epochs", 1, "--train-examples", 64)
    words = ("run", "--task", "mqar", "--mixer", "cat", *small, "--test-examples", 50)
    done = python("-m", "eval.recall", *words, "--out", tmp_path)
    assert done.returncode == 0 and "lag of the largest tap" in done.stdout, done.stderr
    assert len(list((tmp_path / "cells").glob("mqar-cat-d16-L16-*.json"))) == 1
