"""Finished cells of other data: refused before anything is made of them."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest

from cat_lm.core.errors import UserError
from eval.lab import cell as cells
from eval.lab.execution import Execution
from eval.lab.run import run_study
from eval.lab.study import StudyOptions
from eval.long_range import training
from eval.long_range.__main__ import main
from eval.long_range.cell import check_origins
from eval.long_range.grids import SCALES, Choice
from eval.long_range.tasks import TASKS, Place, make_task
from eval.studies import STUDIES
from tests.eval.long_range.files import idx, write_mnist


def other_mnist(folder):
    """Another MNIST of as many images."""
    write_mnist(folder, packed=False)
    path = folder / "t10k-images-idx3-ubyte"
    path.write_bytes(idx(np.zeros((7, 28, 28), dtype=np.uint8)))


def run(monkeypatch, *arguments: object) -> int:
    """The exit code of a command."""
    monkeypatch.setattr(sys, "argv", ["eval.long_range", *map(str, arguments)])
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_run_refuses_what_is_finished_of_other_data(tmp_path, monkeypatch, capsys):
    write_mnist(tmp_path / "a")
    other_mnist(tmp_path / "b")
    command = ("run", "--task", "smnist:size=14", "--mixer", "nope", "--out", tmp_path / "out")
    command += ("--d-model", 16, "--layers", 1, "--epochs", 1, "--device", "cpu")
    command += ("--cache", tmp_path / "cache", "--data")
    assert run(monkeypatch, *command, tmp_path / "a") == 0
    said = capsys.readouterr().out.splitlines()[-1]
    (path,) = (tmp_path / "out" / "cells").glob("*.json")
    monkeypatch.setattr(training, "Trial", None)
    for folder, message in (("b", "was made from other data of smnist:size=14"), ("c", "no such")):
        assert run(monkeypatch, *command, tmp_path / folder) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
        assert folder == "c" or str(path) in error
    assert run(monkeypatch, *command, tmp_path / "a") == 0
    assert capsys.readouterr().out.splitlines()[-1] == said


def test_study_refuses_other_data_before_it_estimates(tmp_path, monkeypatch, capsys):
    write_mnist(tmp_path / "a")
    other_mnist(tmp_path / "b")
    small = {"smnist": {"train_rows": 8, "validation_rows": 4, "test_rows": 7}}
    monkeypatch.setitem(SCALES, "smoke", dataclasses.replace(SCALES["smoke"], of_task=small))
    study, out = STUDIES.get("smnist"), tmp_path / "out"
    there, other = (
        StudyOptions("smoke", rows=("smnist",), more={"long_range": Choice(place=place)})
        for place in (Place(tmp_path / name, tmp_path / "cache") for name in "ab")
    )
    point = study.places(there)[0]
    cells.run(out, point.at(point.rates[0], 0).cell, "cpu", quiet=True)
    for only in (True, False):
        with pytest.raises(UserError, match="was made from other data"):
            run_study(study, other, out, Execution("cpu", estimate_only=only))
        assert "hours" not in capsys.readouterr().out
    assert run_study(study, there, out, Execution("cpu", estimate_only=True)) is None
    assert "hours" in capsys.readouterr().out


def test_runs_of_other_data_are_not_compared(tmp_path, monkeypatch):
    point = STUDIES.get("atomic").places(StudyOptions("smoke"))[0]
    runs = [point.at(1e-3, seed).cell for seed in (0, 1)]
    origins = {runs[0]: "a", runs[1]: "a"}
    monkeypatch.setattr(
        "eval.long_range.cell.finished",
        lambda out, cell: {"data": {"test": {"origin": {"sha256": origins[cell]}}}},
    )
    check_origins(runs, tmp_path)
    origins[runs[1]] = "b"
    with pytest.raises(UserError, match="was made from other data"):
        check_origins(runs, tmp_path)


def test_generators_are_not_asked_for_their_rows_again():
    read = {name for name in TASKS.names() if make_task(name).reads_files}
    assert read == {"imdb", "aan", "cifar10", "pathfinder", "smnist", "pmnist"}
    assert make_task("listops:source=official").reads_files
