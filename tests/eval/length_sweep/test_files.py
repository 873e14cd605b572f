"""What the length sweep stores, and what it computes again."""

from __future__ import annotations

import csv
import json
import shutil

import pytest

from cat_lm.core.errors import UserError
from cat_lm.core.files import unseal, write_sealed
from cat_lm.export import export_model
from cat_lm.pretrained.loading import load_tokenizer
from eval.length_sweep import cells as length_sweep_cells
from eval.length_sweep.sweep import COLUMNS, LISTS, sweep
from tests.finished_runs import tiny_model


@pytest.fixture
def computed(monkeypatch):
    """The cells that are really computed; the one after `computed.stop` interrupts."""

    class Computed(list):
        stop: int | None = None

    compute, seen = length_sweep_cells.Cells._compute, Computed()

    def counted(self, *arguments):
        if len(seen) == seen.stop:
            raise KeyboardInterrupt
        seen.append(arguments[:2])
        return compute(self, *arguments)

    monkeypatch.setattr(length_sweep_cells.Cells, "_compute", counted)
    return seen


def test_files_hold_the_rows(models, tiny_corpus, tmp_path, monkeypatch):
    monkeypatch.undo()  # The pictures are drawn here.
    folders = [models["cat"], models["pythia"]]
    rows = sweep(folders, [32, 64], tmp_path, data=tiny_corpus, max_tokens=300)
    stored = json.loads((tmp_path / "length_sweep.json").read_text())
    assert stored["rows"] == [{name: row[name] for name in (*COLUMNS, *LISTS)} for row in rows]
    for row in stored["rows"]:
        parts = [count for name, count in row.items() if name.startswith("left_out_")]
        assert row["text_tokens"] == row["tokens"] + sum(parts)
        assert (row["tokens"], row["left_out_end"]) == (256, 300 - 256)
        assert row["group_kind"] == "documents"
    assert {"text", "protocol", "command", "date", "versions", "machine"} <= stored.keys()
    with open(tmp_path / "length_sweep.csv", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert [float(row["perplexity"]) for row in table] == [r["perplexity"] for r in rows]
    for name in ("length_sweep", "loss_by_position"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
        assert "training length" in (tmp_path / f"{name}.svg").read_text()
    assert ">context length (tokens)</text>" in (tmp_path / "length_sweep.svg").read_text()


def test_cell_of_another_version_is_refused_and_kept(models, text, tmp_path):
    sweep([models["nope"]], [32], tmp_path, text=text)
    [cell] = (tmp_path / "cells").glob("*.json")
    values, _ = unseal(json.loads(cell.read_text()))
    write_sealed(cell, values | {"format": 2})
    written = cell.read_bytes()
    with pytest.raises(UserError, match=rf"{cell.name}: .*format.*, must be 1: another version"):
        sweep([models["nope"]], [32], tmp_path, text=text)
    assert cell.read_bytes() == written


def test_everything_that_decides_numbers_makes_another_cell(models, text, tmp_path, computed):
    folders = [models["cat"], models["nope"]]
    before = sweep(folders, [16, 64], tmp_path, text=text, methods=["all"])
    computed.clear()
    assert sweep(folders, [16, 64], tmp_path, text=text, methods=["all"]) == before
    assert not computed
    for change in (
        {"stride": 8},
        # One document is the same either way, but another protocol.
        {"documents": "per-document", "min_document_tokens": 64, "max_tokens": before[0]["tokens"]},
        {"methods": ["yarn"], "factor": 3.0},
        {"methods": ["yarn"], "temperature_scope": "rotary"},
        {"methods": ["yarn"], "training_length": 16},
        {"dtype": "bfloat16"},
        {"max_tokens": 200},
    ):
        computed.clear()
        sweep([models["cat"]], [16, 64], tmp_path, text=text, **change)
        assert computed, change
    # Other weights under the same name.
    folder = shutil.copytree(models["cat"], tmp_path / "model")
    (one,) = sweep([folder], [32], tmp_path, text=text)
    export_model(tiny_model(257, seed=9), load_tokenizer(folder), folder)
    (two,) = sweep([folder], [32], tmp_path, text=text)
    assert one["perplexity"] != two["perplexity"]


@pytest.mark.parametrize("documents", ["concatenated", "per-document"])
def test_skipped_tokens_are_in_the_key_and_the_record(
    models, tiny_corpus, tmp_path, computed, documents
):
    given = ([models["cat"]], [32], tmp_path)
    options = {"data": tiny_corpus, "documents": documents, "max_tokens": 320}
    [whole] = sweep(*given, **options)
    [skipped] = sweep(*given, **options, skip_tokens=100)
    assert (whole["skip_tokens"], skipped["skip_tokens"]) == (0, 100)
    assert whole["tokens_sha256"] != skipped["tokens_sha256"]
    assert whole["left_out_skip_tokens"] == 0 and skipped["left_out_skip_tokens"] >= 100
    stored = json.loads((tmp_path / "length_sweep.json").read_text())
    assert stored["rows"][0]["skip_tokens"] == 100
    assert stored["protocol"]["skipped"] == "the split's first 100 tokens"
    assert sweep(*given, **options, skip_tokens=100) == [skipped]
    assert sweep(*given, **options) == [whole] and len(computed) == 2


def test_damaged_cells_are_computed_again(models, text, tmp_path, capsys):
    before = sweep([models["nope"]], [16], tmp_path, text=text)
    (path,) = (tmp_path / "cells").iterdir()
    whole = path.read_bytes()
    for damaged in (whole[:100], json.dumps(json.loads(whole) | {"length": 17}).encode()):
        path.write_bytes(damaged)
        after = sweep([models["nope"]], [16], tmp_path, text=text)
        assert f"{path}: damaged, is computed again" in capsys.readouterr().err
        assert after[0]["loss"] == before[0]["loss"]


def test_interrupted_sweep_resumes(models, text, tmp_path, computed):
    folders, computed.stop = [models["cat"], models["nope"]], 2
    with pytest.raises(KeyboardInterrupt):
        sweep(folders, [16, 32], tmp_path, text=text)
    assert len(json.loads((tmp_path / "length_sweep.json").read_text())["rows"]) == 2
    computed.stop = None
    assert len(sweep(folders, [16, 32], tmp_path, text=text)) == len(computed) == 4
