"""A study runs what is missing, resumes, and its report follows from its record alone."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from cat_lm.core.errors import UserError
from eval import records
from eval import study as command
from eval.lab.execution import Execution
from eval.lab.frame import frame
from eval.lab.page import report
from eval.lab.run import run_study
from eval.lab.study import StudyOptions
from eval.recall import grids
from eval.studies import STUDIES
from tests.calls import call_main


@pytest.fixture
def small(monkeypatch, in_this_process):
    """The study of lengths with two models, one task, one rate and two seeds."""
    scale = replace(grids.SCALES["smoke"], examples=128, epochs=1, length_seeds=2)
    scale = replace(scale, length_rates=(1e-2,), models=("cat", "attention"), bigrams=())
    monkeypatch.setitem(grids.SCALES, "smoke", scale)
    return STUDIES.get("length")


def test_study_resumes_and_writes_its_files(small, tmp_path, capsys):
    record = run_study(small, StudyOptions("smoke"), tmp_path, Execution("cpu"))
    said = capsys.readouterr().out
    assert "5 runs, 5 to do" in said and "hours" in said and "positive control" in said
    files = {path.name for path in tmp_path.glob("length*")}
    pictures_of = {f"length{x}.{y}" for x in ("", "-filters") for y in ("png", "svg")}
    assert files == {"length.json", "length.md", "length.csv", *pictures_of}
    cat = [line for line in record["lines"] if line["line"] == "cat"]
    assert [(line["x"], list(line["runs"])) for line in cat] == [(16, ["0", "1"]), (32, ["0", "1"])]
    table = frame(record["lines"])
    assert len(table) == sum(len(line["runs"]) for line in record["lines"])
    text = (tmp_path / "length.md").read_text()
    assert text == report(small, json.loads((tmp_path / "length.json").read_text()))
    assert text.split("\n\n")[1].startswith("> **The positive control of MQAR failed")
    assert record["command"] in text
    assert "control failed: MQAR" in (tmp_path / "length.svg").read_text()
    # One cell is gone: it alone is trained again, to the same numbers.
    next((tmp_path / "cells").iterdir()).unlink()
    again = run_study(small, StudyOptions("smoke"), tmp_path, Execution("cpu"))
    assert "5 runs, 1 to do" in capsys.readouterr().out
    assert again["lines"] == record["lines"] and again["contrasts"] == record["contrasts"]
    more = run_study(small, StudyOptions("smoke", models=("cat",)), tmp_path, Execution("cpu"))
    assert more["not_run"] == ["attention"] and "Not run: `attention`" in report(small, more)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("mamba --rows MQAR", "--rows: has no effect on the study mamba"),
        ("mamba --tokens 1M", "--tokens: has no effect on the study mamba; leave it out"),
        ("maps --stack 2", "--stack: has no effect on the study maps"),
        ("accuracy --protocol lra", "--protocol: has no effect on the study accuracy"),
        ("accuracy --scale gpu", "--scale gpu: the study accuracy has smoke, cpu, paper"),
        ("length --scale smoke --rows x", "--rows 'x': choose among MQAR"),
        ("length --scale smoke --models ct", "ct"),
        ("length --scale smoke --models none", "is in every figure"),
        ("length --scale smoke --models cat cat", "is given twice"),
        ("smnist --scale smoke --rows x", "choose among smnist; pmnist"),
        ("maps --models rwkv", "--models rwkv: choose among pythia, "),
        ("maps --data nowhere", "nowhere: no such folder"),
        ("acuracy", "acuracy"),
    ],
)
def test_wrong_option_is_one_line(words, said, monkeypatch, tmp_path, capsys, tiny_corpus):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("eval.language.grids.LIBRARY", ("--source", "none"))
    given = (*words.split(), "--out", tmp_path / "out")
    if words.startswith("maps --models"):
        given += ("--data", tiny_corpus)
    code, _, err = call_main(command.main, monkeypatch, capsys, "eval.study", *given)
    assert code == 2 and said in err and err.count("\n") == 1


def test_records_are_rendered_and_compared(tmp_path, monkeypatch, capsys):
    texts = records.render(records.FOLDER)
    for name, text in texts.items():
        assert (records.FOLDER / name).read_text(encoding="utf-8") == text, name

    def call(*words):
        given = ("render", "--folder", tmp_path, *words)
        return call_main(records.main, monkeypatch, capsys, "eval.records", *given)

    name = "maps_cpu"
    shutil.copy(records.FOLDER / f"{name}.json", tmp_path)
    assert f"{name}.md, README.md: not as their records say" in call("--check")[2]
    assert call()[0] == call("--check")[0] == 0
    measured = '[{"date": "2026-01-02T03", "machine": "M", "commit": null}]'
    (tmp_path / "speed.json").write_text(measured)
    assert "| [speed](speed.json) | M | 2026-01-02 |  |" in records.render(tmp_path)["README.md"]
    (tmp_path / "speed.note.md").write_text("One process.")
    text = records.render(tmp_path)["speed.md"]
    assert "Measured on 2026-01-02; M." in text and text.endswith("\n## Note\n\nOne process.\n")
    (tmp_path / f"{name}.note.md").write_text("word " * 121)
    with pytest.raises(UserError, match="more than 120 words"):
        records.render(tmp_path)
