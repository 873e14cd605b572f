"""Cells: they learn, stop, are kept, and say clearly what does not fit."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess

import numpy as np
import pytest
import torch

from cat_lm.core.errors import UserError
from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.mixers import make_mixer
from eval.lab import cell as cells
from eval.recall.cell import Cell, delays
from eval.recall.measuring import free_running, measure, measure_stack
from eval.recall.model import RecallModel
from eval.recall.tasks import Examples, generate, make_task
from tests.commands import python

SMALL = {"d_model": 32, "seq_len": 16, "test_examples": 200, "batch_size": 64}
SMALL["validation_examples"] = 100


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
    found = delays(record["filters"])[0]
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


def test_the_optimiser_and_its_schedule_are_zoologys(monkeypatch):
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


def test_a_cell_is_a_pure_function_of_its_seed():
    cell = Cell("mqar:vocab_size=64", "cat", train_examples=256, epochs=1, **SMALL)
    first, again = cell.run(), cell.run()
    other = dataclasses.replace(cell, seed=1).run()
    assert first["history"] == again["history"] and first["filters"] == again["filters"]
    assert first["filters"] != other["filters"]


class Oracle(torch.nn.Module):
    """Answers from a table: (fed token) -> token, through the interface of RecallModel."""

    def __init__(self, answer: torch.Tensor) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(len(answer), 2)
        self.answer = answer

    def forward(self, tokens: torch.Tensor, scored: torch.Tensor) -> torch.Tensor:
        answers = self.answer[tokens.gather(1, scored)].flatten()
        return torch.nn.functional.one_hot(answers, len(self.answer)).float()


def test_accuracy_is_the_mean_over_rows_and_free_running_feeds_answers_back():
    # ⊥ = 5 is answered 1, 1 is answered 2, 2 is answered 4 (wrong: 3), 4 and 3 are answered 0.
    model = Oracle(torch.tensor([0, 2, 4, 4, 0, 1]))
    inputs = np.array([[0, 0, 5, 1, 2, 3]])
    labels = np.array([[IGNORE_INDEX, IGNORE_INDEX, 1, 2, 3, 4]])
    examples = Examples(np.repeat(inputs, 3, axis=0), np.repeat(labels, 3, axis=0))
    assert measure(model, examples) == {"accuracy": 0.75, "rows_right": 0.0}
    # Fed its own 4 in place of 3 it answers 0 where 4 was due.
    assert free_running(model, examples)["free_running_accuracy"] == 0.5


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_whose_answers_are_no_numbers_is_not_one_that_is_wrong(value):
    """The likeliest of them is a token, which may even be the right one."""
    inputs = np.array([[0, 0, 5, 1], [0, 0, 5, 2]])
    labels = np.array([[IGNORE_INDEX, IGNORE_INDEX, 1, 2], [IGNORE_INDEX, IGNORE_INDEX, 1, 3]])
    groups = {"known": np.array([[True, False], [True, False]])}
    examples = Examples(inputs, labels, groups)
    table = torch.tensor([0, 2, 3, 4, 0, 1])
    sound, lost = Oracle(table), Oracle(table)
    answer = lost.forward

    def broken(tokens, scored):
        logits = answer(tokens, scored)
        logits[-1, 3] = value  # of the last row's last answer alone
        return logits

    lost.forward = broken
    names = {"accuracy", "rows_right", "accuracy_known"}
    assert measure(lost, examples) == dict.fromkeys(names, -math.inf)
    assert set(free_running(lost, examples).values()) == {-math.inf}
    assert set(measure(sound, examples)) == names and measure(sound, examples)["accuracy"] == 1.0
    # In a stack only the one that diverged.
    both = [lambda *given, m=model: m(*given) for model in (sound, lost, sound)]

    def answers(tokens, positions):
        return torch.stack([m(t, p) for m, t, p in zip(both, tokens, positions, strict=True)])

    found = measure_stack(answers, [examples] * 3, len(table), "cpu")
    assert [one["accuracy"] for one in found] == [1.0, -math.inf, 1.0]


def test_teacher_forcing_equals_free_running_for_a_model_that_is_always_right():
    task = make_task("selective-copy", 24, {"copies": "4", "signals": "4"})
    examples = generate(task, 20, seed=0, split="test")
    torch.manual_seed(0)
    model = RecallModel(
        make_mixer("cat"), vocabulary=task.vocabulary, d_model=16, positions=24, layers=1
    )
    scored = torch.from_numpy(examples.labels) != IGNORE_INDEX
    model.eval()
    with torch.no_grad():
        first = model(torch.from_numpy(examples.inputs), scored).argmax(1).view(20, 4)[:, 0]
    forced = (first.numpy() == examples.labels[:, -4]).mean()
    only_first = Examples(examples.inputs[:, :21], examples.labels[:, :21])
    assert free_running(model, only_first)["free_running_accuracy"] == pytest.approx(forced)


def test_finished_cells_are_kept(tmp_path, monkeypatch):
    cell = Cell("mqar:vocab_size=64", "none", train_examples=64, epochs=1, **SMALL)
    first = cells.run(tmp_path, cell, "cpu")
    path = cells.cell_path(tmp_path, cell)
    assert json.loads(path.read_text())["accuracy"] == first["accuracy"]
    assert first["provenance"]["versions"]["torch"] and first["provenance"]["device"] == "cpu"
    monkeypatch.setattr("eval.recall.training.Trial", None)
    assert cells.run(tmp_path, cell, "cpu")["history"] == first["history"]


def test_all_that_decides_a_result_decides_its_file(tmp_path):
    cell = Cell("mqar", "none", 32, 16, test_lengths=(16,))
    others = {"task": "ar", "mixer": "cat", "d_model": 16, "seq_len": 32, "lr": 0.02, "seed": 1}
    others |= {"epochs": 1, "train_examples": 8, "test_examples": 8, "layers": 1, "batch_size": 8}
    others |= {"weight_decay": 0.0, "stop_above": None, "eval_steps": 1, "test_lengths": (32,)}
    others |= {"fixed_items": True, "validation_examples": 8, "embedding_dropout": 0.5}
    assert others.keys() == {field.name for field in dataclasses.fields(Cell)}
    changed = [dataclasses.replace(cell, **{name: value}) for name, value in others.items()]
    assert len({cells.cell_path(tmp_path, one) for one in (cell, *changed)}) == len(others) + 1


def test_a_file_takes_the_name_of_a_cell_with_any_options(tmp_path):
    """The end of long options is not in the name, but in its hash."""
    every = "streams=qkv,window=4,conv_type=depthwise,init=identity,activation=none,heads=1,"
    every += "shared_kv=false,dropout=0.0,position=none,conv_mixing=embeddings,bias=false"
    task = "mqar:keys=2,vocab_size=64,power_a=0.01,filler=unused,unmatched=0"
    small = {**SMALL, "d_model": 8, "train_examples": 64, "epochs": 1}
    mixers = [f"cat:{every}", f"cat:{every}".replace("bias=false", "bias=true")]
    alike = [Cell(task, mixer, **small) for mixer in mixers]
    paths = [cells.cell_path(tmp_path, cell) for cell in alike]
    assert paths[0] != paths[1] and paths[0].name[:200] == paths[1].name[:200]
    assert all("-d8-L16-lr0.01-seed0-" in path.name for path in paths)
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.with_name(f"{path.stem}-filters.png").touch()
    record = cells.run(tmp_path, alike[0], "cpu")
    assert cells.finished(tmp_path, alike[0])["accuracy"] == record["accuracy"]


@pytest.mark.parametrize("change", ["of another seed", "without steps"])
def test_a_record_of_something_else_is_refused(tmp_path, change):
    """Also with its seal intact: a copy of seed 0 is no seed 1."""
    cell = Cell("mqar:vocab_size=64", "none", train_examples=64, epochs=1, **SMALL)
    record = cells.run(tmp_path, cell, "cpu")
    if change == "without steps":
        del record["steps"]
    else:
        cell = dataclasses.replace(cell, seed=1)
    cells._store(tmp_path, cell).write(cells._name(cell), record)
    path = re.escape(str(cells.cell_path(tmp_path, cell)))
    with pytest.raises(UserError, match=f"{path}: (has no steps|damaged: is of .*); delete it"):
        cells.finished(tmp_path, cell)


@pytest.mark.parametrize(
    ("place", "told"),
    [("cells", r"json: .*/cells is a file; give a file"), ("the cell", r"json: is a folder; give")],
)
def test_where_no_cell_can_be_written_none_is_trained(tmp_path, monkeypatch, place, told):
    cell = Cell("mqar:vocab_size=64", "none", train_examples=64, epochs=1, **SMALL)
    if place == "cells":
        (tmp_path / "cells").touch()
    else:
        cells.cell_path(tmp_path, cell).mkdir(parents=True)
    monkeypatch.setattr("eval.recall.training.Trial", None)
    with pytest.raises(UserError, match=told):
        cells.run(tmp_path, cell, "cpu")


def test_the_papers_batches_and_layers():
    assert [Cell("mqar", "cat", 8, n).rows for n in (64, 128, 256, 512, 1024)] == [
        512,
        512,
        256,
        128,
        64,
    ]
    assert make_mixer("cat").layers == make_mixer("lincat").layers == 1
    assert all(make_mixer(m).layers == 2 for m in ("attention", "based", "linear-attention"))


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"task": "mqar:keys=9"}, "keys=9: seq_len=16 fits 1 to 4"),
        ({"task": "mqnar:ngram=8"}, "too short"),
        ({"mixer": "cat:heads=5"}, "do not divide"),
        ({"test_lengths": (3,)}, "--test-lengths 3"),
        ({"lr": 0.0}, "lr=0.0"),
        ({"epochs": 0}, "epochs=0"),
    ],
)
def test_what_does_not_fit_is_one_clear_line(changes, words):
    base = {"task": "mqar", "mixer": "cat", **SMALL}
    with pytest.raises(UserError) as error:
        Cell(**{**base, **changes}).run()
    assert words in str(error.value) and "\n" not in str(error.value)


def test_the_command_line(tmp_path):
    def call(*words: object) -> subprocess.CompletedProcess:
        return python("-m", "eval.recall", *words)

    assert "theory" in call("--help").stdout
    assert "mqar" in call("run", "--help").stdout
    assert "--trials" in call("theory", "--help").stdout
    small = ("--d-model", 16, "--seq-len", 16, "--epochs", 1, "--train-examples", 64)
    words = ("run", "--task", "mqar", "--mixer", "cat", *small, "--test-examples", 50)
    done = call(*words, "--out", tmp_path)
    assert done.returncode == 0 and "lag of the largest tap" in done.stdout, done.stderr
    assert len(list((tmp_path / "cells").glob("mqar-cat-d16-L16-*.json"))) == 1
    wrong = call("run", "--task", "mqar:keys=5", "--mixer", "cat", *small, "--out", tmp_path)
    assert wrong.returncode == 2
    assert wrong.stderr.strip() == "error: task mqar: keys=5: seq_len=16 fits 1 to 4"
