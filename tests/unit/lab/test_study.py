"""A study runs what is missing, resumes, and its report follows from its record alone."""

from __future__ import annotations

import copy
import json
import math
import shutil
import sys
from dataclasses import replace

import pytest

from cat_lm.core.errors import UserError
from eval import records
from eval import study as command
from eval.lab import cell as cells
from eval.lab import execution as running
from eval.lab.contrasts import compute, half_width
from eval.lab.execution import Execution
from eval.lab.figures import draw
from eval.lab.frame import frame
from eval.lab.page import report, warnings
from eval.lab.run import pictures, run_study
from eval.lab.study import Asked
from eval.recall import grids
from eval.studies import STUDIES

STUDY_RECORDS = [
    (file.stem, record)
    for file in sorted(records.FOLDER.glob("*.json"))
    if isinstance(record := json.loads(file.read_text(encoding="utf-8")), dict)
    and "study" in record
]


@pytest.fixture
def small(monkeypatch):
    """The study of lengths with two models, one task, one rate and two seeds."""
    scale = replace(grids.SCALES["smoke"], examples=128, epochs=1, length_seeds=2)
    scale = replace(scale, length_rates=(1e-2,), models=("cat", "attention"), bigrams=())
    monkeypatch.setitem(grids.SCALES, "smoke", scale)

    def in_this_process(groups, out, device, workers):
        for run in (run for group in groups for run in group):
            cells.run(out, run.cell, device, quiet=True)

    monkeypatch.setattr(running, "execute", in_this_process)
    return STUDIES.get("length")


def test_study_resumes_and_writes_its_files(small, tmp_path, capsys):
    record = run_study(small, Asked("smoke"), tmp_path, Execution("cpu"))
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
    assert (
        record["command"] in text
        and "control failed: MQAR" in (tmp_path / "length.svg").read_text()
    )
    # One cell is gone: it alone is trained again, to the same numbers.
    lost = next((tmp_path / "cells").iterdir())
    lost.unlink()
    again = run_study(small, Asked("smoke"), tmp_path, Execution("cpu"))
    assert "5 runs, 1 to do" in capsys.readouterr().out
    assert again["lines"] == record["lines"] and again["contrasts"] == record["contrasts"]
    for estimate in (True, False):
        found = run_study(small, Asked("smoke"), tmp_path, Execution("cpu", estimate_only=estimate))
        assert (found is None) == estimate
    more = run_study(small, Asked("smoke", models=("cat",)), tmp_path, Execution("cpu"))
    assert more["not_run"] == ["attention"] and "Not run: `attention`" in report(small, more)


def test_options_without_an_effect_are_refused(monkeypatch, tmp_path, capsys):
    for words, said in (
        (["mamba", "--rows", "MQAR"], "--rows: has no effect on the study mamba"),
        (["accuracy", "--protocol", "lra"], "--protocol: has no effect on the study accuracy"),
        (["atomic", "--stack", "2"], "--stack: has no effect on the study atomic"),
        (["smnist", "--scale", "smoke", "--rows", "x"], "choose among smnist; pmnist"),
        (["acuracy"], "acuracy"),
    ):
        monkeypatch.setattr(sys, "argv", ["eval.study", *words, "--out", str(tmp_path / "out")])
        with pytest.raises(SystemExit) as ended:
            command.main()
        assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(("name", "record"), STUDY_RECORDS, ids=[name for name, _ in STUDY_RECORDS])
def test_intervals_of_committed_records_follow_from_their_runs(name, record):
    study = STUDIES.get(record["study"])
    lines = [line for line in record["lines"] if line["row"] != "control"]
    found = compute(study.contrasts(lines), by_row=study.by_row)
    for one in found:  # errors over documents are kept, not the documents
        there = next(x for x in record["contrasts"] if all(
            x[key] == one[key] for key in ("row", "column", "x", "contrast")))  # fmt: skip
        if there["document_error"] is not None:
            half = half_width(
                one["seed_error"], one["n"], there["document_error"], there["documents"],
                one["comparisons"],
            )  # fmt: skip
            one["low"], one["high"] = one["mean"] - half, one["mean"] + half
        for key in ("mean", "low", "high"):
            assert one[key] == pytest.approx(there[key], abs=1e-9, nan_ok=True), one["contrast"]
        assert (one["n"], one["comparisons"]) == (there["n"], there["comparisons"])
    has_intervals = any(len(line["runs"]) > 1 for line in lines)
    assert len(found) == len(record["contrasts"]) and bool(found) == has_intervals


def test_committed_reports_are_as_their_records_say(tmp_path, monkeypatch, capsys):
    for name, text in records.render(records.FOLDER).items():
        assert (records.FOLDER / name).read_text(encoding="utf-8") == text, name
    name = STUDY_RECORDS[0][0]
    shutil.copy(records.FOLDER / f"{name}.json", tmp_path)
    call = ["eval.records", "render", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*call, "--check"])
    with pytest.raises(SystemExit):
        records.main()
    assert f"{name}.md, README.md: not as their records say" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", call)
    records.main()
    monkeypatch.setattr(sys, "argv", [*call, "--check"])
    records.main()
    (tmp_path / "speed.json").write_text(
        '[{"date": "2026-01-02T03", "machine": "M", "commit": null}]'
    )
    assert "| [speed](speed.json) | M | 2026-01-02 |  |" in records.render(tmp_path)["README.md"]
    (tmp_path / "speed.note.md").write_text("One process.")
    assert "Measured on 2026-01-02; M." in (text := records.render(tmp_path)["speed.md"])
    assert text.endswith("\n## Note\n\nOne process.\n")
    (tmp_path / f"{name}.note.md").write_text("word " * 121)
    with pytest.raises(UserError, match="more than 120 words"):
        records.render(tmp_path)


def test_every_value_of_a_record_is_in_its_report():
    record = dict(STUDY_RECORDS)["recall_accuracy_bigrams_cpu"]
    text = report(STUDIES.get(record["study"]), record)
    for line in record["lines"]:
        if line["row"] != "control":
            values = line["runs"].values()
            mean = sum(values) / len(values)
            assert f"{mean:.4f}" in text
            assert len(values) == 1 or f"({min(values):.4f} to {max(values):.4f})" in text
    for x in record["contrasts"]:
        assert f"{x['mean']:+.3f} [{x['low']:+.3f}, {x['high']:+.3f}]" in text


def test_runs_that_diverged_are_named_and_leave_no_interval():
    record = copy.deepcopy(dict(STUDY_RECORDS)["long_range_smnist_cpu"])
    line = record["lines"][0]
    line["runs"]["0"] = None
    record["diverged"] = [{k: line[k] for k in ("row", "column", "line")} | {"seed": 0}]
    (said,) = warnings(record)
    assert said.startswith("Diverged") and f"`{line['line']}` on smnist with seed 0" in said
    assert "diverged (1 of 3)" in report(STUDIES.get("smnist"), record)
    lines = [x for x in record["lines"] if x["row"] != "control"]
    first = compute(STUDIES.get("smnist").contrasts(lines))[0]
    assert first["low"] is None and first["lost"] == 1
    axes = draw(STUDIES.get("smnist"), record).axes[0]
    assert "1 diverged" in [text.get_text() for text in axes.texts]


@pytest.mark.parametrize(("name", "record"), STUDY_RECORDS, ids=[name for name, _ in STUDY_RECORDS])
def test_figure_shows_every_run(name, record):
    figure = pictures(STUDIES.get(record["study"]), record)[""]
    lines = [line for line in record["lines"] if line["row"] != "control"]
    names = list(dict.fromkeys(line["line"] for line in lines))
    panels = [axes for axes in figure.axes if axes.lines or axes.collections]
    rows = {(x["row"], x["column"]) for x in lines}
    kind = STUDIES.get(record["study"]).figure
    expected = len({row for row, _ in rows}) if kind == "strips" else len(rows)
    if kind == "losses":  # strips at the trained length, and curves
        lengths = {place: {x["x"] for x in lines if (x["row"], x["column"]) == place}
                   for place in rows}  # fmt: skip
        trained = record["extra"]["training_length"]
        expected = sum((trained in found) + (len(found) > 1) for found in lengths.values())
    assert len(panels) == expected
    drawn = sum(len(c.get_offsets()) for axes in panels for c in axes.collections)
    drawn += sum(len(m.get_xdata()) for axes in panels for m in axes.lines
                 if m.get_linestyle() == "None" and m.get_marker() != "|")  # fmt: skip
    said = sum(text.get_text().count(",") + 1 for axes in panels for text in axes.texts)
    every = sum(v is not None and math.isfinite(v) for x in lines for v in x["runs"].values())
    assert drawn + said >= every and names
