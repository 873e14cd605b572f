"""Training a cell: what is looked at when, restarts, controls, figures and their pages."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from cat_lm.core.errors import UserError
from eval import study as study_command
from eval.lab import cell as cells
from eval.lab.places import CONTROL, NEGATIVE
from eval.lab.study import StudyOptions
from eval.long_range import training
from eval.long_range.__main__ import main
from eval.long_range.cell import Cell, fitted
from eval.long_range.grids import SCALES, TASKS, Choice, place_on_axis
from eval.long_range.tasks import Place, make_task
from eval.studies import STUDIES

SUMS = "cumsum:seq_len=6,train=20,validation=6,test=10"
LISTS = "listops:min_length=3,max_length=14,train=24,validation=6,test=8"


def cell(task: str = SUMS, mixer: str = "las:position=none", **options) -> Cell:
    fixed = {"d_model": 16, "layers": 1, "lr": 1e-3, "batch_size": 8, "epochs": 2}
    return Cell(task, mixer, **(fixed | options))


def _rows(examples):
    """All rows of a split, padded alike, and their labels."""
    batch = examples.batch(np.arange(len(examples)))
    return batch.inputs, batch.labels


def _here(groups, out, device, workers):
    """Run cells in this process."""
    for group in groups:
        for one in group:
            cells.run(out, one.cell, device, quiet=True)


def run(monkeypatch, *arguments: object) -> None:
    program, *words = ("eval.long_range", *arguments)
    if arguments[0] == "study":
        program, words = "eval.study", arguments[1:]
    monkeypatch.setattr(sys, "argv", [program, *map(str, words)])
    (study_command.main if program == "eval.study" else main)()


def plan(name: str, scale: str, choice: Choice | None = None, rows: tuple[str, ...] = ()):
    """The places of a study, as if its files were there."""
    choice = choice or Choice()
    needs_files = any(make_task(SCALES[scale].tasks[task]).reads_files for task in rows or [
        task for task in TASKS[name] if task in SCALES[scale].tasks])  # fmt: skip
    if needs_files:
        choice = dataclasses.replace(choice, place=Place(Path("official"), Path("cache")))
    return STUDIES.get(name).places(StudyOptions(scale, rows=rows, more={"long_range": choice}))


def loaded(which) -> training.Trial:
    trial = training.Trial(which, "cpu")
    trial.load()
    return trial


class TestCells:
    def test_the_test_is_looked_at_once_after_training(self, monkeypatch):
        looked, real = [], training.measure

        def measure(model, examples, rows):
            looked.append(len(examples))
            return real(model, examples, rows)

        monkeypatch.setattr(training, "measure", measure)
        record = cell(eval_steps=2).run(quiet=True)
        # Three steps an epoch: after the second, fourth and each epoch's end (the sixth is both).
        assert looked == [6, 6, 6, 6, 10]
        assert [point["step"] for point in record["history"]] == [2, 3, 4, 6]
        assert record["data"]["test"]["rows"] == 10 and record["metric"] == "r2"

    def test_the_model_of_the_best_validation_is_tested(self, monkeypatch):
        values, weights, real = iter([0.5, 0.9, 0.1]), [], training.measure

        def measure(model, examples, rows):
            weights.append(model.head.weight.detach().clone())
            return next(values) if len(examples) == 6 else real(model, examples, rows)

        monkeypatch.setattr(training, "measure", measure)
        record = cell(epochs=3).run(quiet=True)
        assert record["validation"] == {"step": 6, "value": 0.9}
        assert torch.equal(weights[-1], weights[1]) and not torch.equal(weights[2], weights[1])

    def test_the_rate_falls_where_validation_stands_still(self, monkeypatch):
        rates = []

        def note(trial, batch):
            rates.append(trial.optimizer.param_groups[0]["lr"])
            return torch.tensor(0.0)

        monkeypatch.setattr(training.Trial, "update", note)
        cell(epochs=5, patience=1).run(quiet=True)
        assert rates == pytest.approx([1e-3] * 9 + [2e-4] * 6)

    def test_r2_and_accuracy(self):
        class Answers(torch.nn.Module):
            task = make_task(SUMS)

            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.zeros(1))

            def forward(self, inputs, lengths):
                sums = inputs[..., 0].cumsum(1) / torch.arange(1, 7).sqrt()
                return sums * (1 - self.weight)

        rows, made = make_task(SUMS).load("test"), Answers()
        assert training.measure(made, rows, 3) == pytest.approx(1)
        right = rows.batch(np.arange(10)).labels
        made.weight.data += 1  # always 0
        assert training.measure(made, rows, 3) == pytest.approx(1 - (right**2).mean() / right.var())
        made.weight.data += torch.nan
        assert training.measure(made, rows, 3) < -sys.float_info.max

    def test_a_model_that_diverged_is_not_at_chance(self, tmp_path):
        task = cell(LISTS, train_rows=4, place=Place(cache=tmp_path))
        trial = loaded(task)
        assert trial.measure("test")["value"] >= 0
        trial.model.head.weight.data[3] = torch.nan
        assert trial.measure("test")["value"] == -math.inf == trial.measure_exchanged()

    def test_other_rows_labels_are_those_of_other_rows(self, tmp_path):
        shuffled = cell(LISTS, is_shuffled=True, place=Place(cache=tmp_path))
        plain = dataclasses.replace(shuffled, is_shuffled=False)
        there, real = (loaded(x).examples["train"] for x in (shuffled, plain))
        order, every = np.random.default_rng(0).permutation(24), np.arange(24)
        batch, usual = there.batch(order), real.batch(every)
        assert (batch.labels == real.labels[order]).all()
        rows = sorted(row.tobytes() for row in usual.inputs)
        assert sorted(row.tobytes() for row in batch.inputs) == rows
        assert (batch.inputs != usual.inputs[order]).any(axis=1).sum() > 12
        assert (there.lengths[order] == batch.lengths).all()
        with pytest.raises(UserError, match="has no classes to exchange"):
            cell(is_shuffled=True).run()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"train_rows": 21}, "train_rows=21: cumsum:seq_len=6,train=20"),
            ({"lr": 0}, "lr=0: must be"),
            ({"norm": "none"}, "norm=none: must be layer or batch"),
            ({"layers": 0}, "layers=0: must be from 1"),
        ],
    )
    def test_what_does_not_fit_is_one_line(self, options, message):
        with pytest.raises(UserError) as error:
            cell(**options).run()
        assert message in str(error.value) and "\n" not in str(error.value)


class TestCommand:
    def test_run_trains_the_papers_models_as_its_figure_does(self, tmp_path, monkeypatch):
        trained = []

        def run_cell(cell, device):
            trained.append(cell)
            raise UserError("this is enough")

        monkeypatch.setattr(training, "Trial", run_cell)
        figured = plan("lra", "paper")
        for task, mixer in (("cifar10", "las"), ("imdb", "l"), ("pathfinder", "s")):
            with pytest.raises(SystemExit):
                run(monkeypatch, "run", "--task", task, "--mixer", mixer, "--out", tmp_path)
            (wanted,) = (p.run for p in figured if (p.run.row, p.run.line) == (task, mixer))
            assert trained[-1] == wanted.cell and trained[-1].is_causal
        both = ("--direction", "both", "--mixer", "las:width=7")
        with pytest.raises(SystemExit):
            run(monkeypatch, "run", "--task", "cifar10", *both, "--out", tmp_path)
        assert trained[-1].mixer == "las:width=7" and not trained[-1].is_causal

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("run", "--task", "sum", "--mixer", "las"), "task='sum': must be one of listops"),
            (("run", "--task", SUMS, "--mixer", "lass"), "--mixer='lass': must be one of softmax"),
            (("run", "--task", SUMS, "--mixer", "las", "--lr", "0"), "--lr"),
            (("study", "smnist", "--protocol", "test"), "invalid choice: 'test'"),
            (("study", "lra", "--scale", "paper"), "pathfinder is read from official files alone"),
            (("study", "smnist", "--protocol", "lra"), "--protocol lra: has no effect on smnist,"),
            (("study", "atomic", "--data", "."), "--data: has no effect on select, cumsum"),
            (("run", "--task", SUMS, "--mixer", "las", "--data", "."), "no effect on cumsum"),
            (("run", "--task", SUMS, "--mixer", "las", "--pool", "last"), "--pool: has no effect"),
            (("study", "atomic", "--rows", "imdb"), "--rows 'imdb': choose among select"),
            (("study", "atomic", "--models", "none"), "--models none: is in every figure"),
            (("study", "atomic", "--models", "las", "las"), "--models las: is given twice"),
            (("study", "atomic", "--models", "lass"), "--models='lass': must be one of"),
        ],
    )
    def test_wrong_arguments_are_one_line(self, arguments, message, tmp_path, monkeypatch, capsys):
        with pytest.raises(SystemExit) as ended:
            run(monkeypatch, *arguments, "--out", tmp_path / "out")
        error = capsys.readouterr().err
        assert ended.value.code == 2 and error.count("\n") == 1
        assert error.startswith("error: ") and message in error
        assert not (tmp_path / "out").exists()


class TestFigures:
    def test_mixers_get_the_papers_widths_and_bounds(self):
        assert fitted("las", "imdb") == "las:bound=0.0001"
        assert fitted("las:chunk=128", "cifar10") == "las:chunk=128,width=3"
        assert fitted("las:values=none", "cifar10") == "las:values=none"
        assert fitted("vanilla", "cifar10") == "vanilla" and fitted("mamba", "imdb") == "mamba"
        sizes = plan("data-size", "paper", rows=("listops",))
        las = [p.run for p in sizes if p.run.line == "las" and p.run.row != CONTROL]
        assert [r.cell.rows_of("train") for r in las] == [9_600, 24_000, 48_000, 72_000, 96_000]
        (nothing,) = (p.run for p in sizes if p.run.line == NEGATIVE)
        assert place_on_axis(nothing, {"data": {"train": {"rows": 95_000}}}) == 95_000
        assert {place_on_axis(p.run, {}) for p in plan("context", "cpu")} == {16, 64, 200}
