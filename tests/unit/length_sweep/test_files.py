"""What the length sweep stores, and what it computes again."""

from __future__ import annotations

import csv
import json
import shutil

import pytest

from cat_lm.core.errors import UserError
from cat_lm.core.files import opened, write_sealed
from cat_lm.export import export_model
from cat_lm.pretrained.loading import load_tokenizer
from eval.length_sweep import cells as length_sweep_cells
from eval.length_sweep.sweep import COLUMNS, sweep
from tests.finished_runs import tiny_model


class TestFiles:
    def test_files_hold_the_rows(self, models, tiny_corpus, tmp_path, monkeypatch):
        monkeypatch.undo()
        out = tmp_path / "out"
        folders = [models["cat"], models["pythia"]]
        rows = sweep(folders, [32, 64], out, data=tiny_corpus, max_tokens=300)
        stored = json.loads((out / "length_sweep.json").read_text())
        names = (*COLUMNS, "positions", "document_nlls", "document_tokens")
        assert stored["rows"] == [{name: row[name] for name in names} for row in rows]
        assert stored["rows"][0]["tokens"] == 256
        assert stored["rows"][0]["group_kind"] == "documents"
        for row in stored["rows"]:
            parts = [count for name, count in row.items() if name.startswith("left_out_")]
            assert row["text_tokens"] == row["tokens"] + sum(parts)
            assert row["left_out_end"] == 300 - 256
        assert {"text", "protocol", "command", "date", "versions", "machine"} <= stored.keys()
        with open(out / "length_sweep.csv", encoding="utf-8") as file:
            table = list(csv.DictReader(file))
        assert [float(row["perplexity"]) for row in table] == [r["perplexity"] for r in rows]
        for name in ("length_sweep", "loss_by_position"):
            assert (out / f"{name}.png").stat().st_size > 5000
            assert "training length" in (out / f"{name}.svg").read_text()

    @pytest.mark.parametrize("change", [{}, {"format": 2}])
    def test_cells_of_another_version_are_refused(self, models, text, tmp_path, change):
        sweep([models["nope"]], [32], tmp_path, text=text)
        [cell] = (tmp_path / "cells").glob("*.json")
        values, _ = opened(json.loads(cell.read_text()))
        assert values.pop("format") == 1
        write_sealed(cell, values | change)
        written = cell.read_bytes()
        said = rf"{cell.name}: .*format.*, must be 1: another version of cat_lm wrote it; delete it"
        with pytest.raises(UserError, match=said):
            sweep([models["nope"]], [32], tmp_path, text=text)
        assert cell.read_bytes() == written, "not written over"

    def test_finished_cells_are_not_computed_again(self, models, text, tmp_path, monkeypatch):
        out = tmp_path / "out"
        folders = list(models.values())
        before = sweep(folders, [16, 64], out, text=text, methods=["all"])
        with monkeypatch.context() as patch:
            patch.setattr(length_sweep_cells, "load_model", None)  # would fail when called
            assert sweep(folders, [16, 64], out, text=text, methods=["all"]) == before
            changes = (
                {"stride": 8},
                {"documents": "per-document", "min_document_tokens": 64},
                {"methods": ["yarn"], "factor": 3.0},
                {"methods": ["yarn"], "temperature_scope": "rotary"},
                {"methods": ["yarn"], "training_length": 16},
                {"dtype": "bfloat16"},
                {"max_tokens": 200},
            )
            for change in changes:
                if change.get("documents"):
                    # One document is the same either way, but another protocol.
                    change["max_tokens"] = before[0]["tokens"]
                with pytest.raises(TypeError):
                    sweep([models["cat"]], [16, 64], out, text=text, **change)

    @pytest.mark.parametrize("documents", ["concatenated", "per-document"])
    def test_skipped_tokens_are_in_the_key_and_the_record(
        self, models, tiny_corpus, tmp_path, monkeypatch, documents
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
        cells = [json.loads(path.read_text()) for path in (tmp_path / "cells").iterdir()]
        assert sorted(cell["skip_tokens"] for cell in cells) == [0, 100]
        monkeypatch.setattr(length_sweep_cells, "load_model", None)  # would fail when called
        assert sweep(*given, **options, skip_tokens=100) == [skipped]
        assert sweep(*given, **options) == [whole]

    def test_damaged_cells_are_computed_again(self, models, text, tmp_path, capsys):
        out = tmp_path / "out"
        before = sweep([models["cat"]], [16], out, text=text)
        (path,) = (out / "cells").iterdir()
        whole = path.read_bytes()
        values = json.loads(whole)
        for damaged in (
            whole[:100],
            b"",
            b"[]",
            b"\xff\xfe",
            json.dumps({k: v for k, v in values.items() if k != "positions"}).encode(),
            json.dumps(values | {"length": 17}).encode(),
        ):
            path.write_bytes(damaged)
            capsys.readouterr()
            after = sweep([models["cat"]], [16], out, text=text)
            assert f"{path}: damaged, is computed again" in capsys.readouterr().err
            assert after[0]["loss"] == before[0]["loss"]
            assert json.loads(path.read_bytes()).keys() == values.keys()

    def test_interrupted_sweep_goes_on_where_it_stopped(self, models, text, tmp_path, monkeypatch):
        out = tmp_path / "out"
        compute, calls = length_sweep_cells.Cells._compute, []

        def stops_after_two(self, *arguments):
            if len(calls) == 2:
                raise KeyboardInterrupt
            calls.append(arguments)
            return compute(self, *arguments)

        monkeypatch.setattr(length_sweep_cells.Cells, "_compute", stops_after_two)
        folders = [models["cat"], models["nope"]]
        with pytest.raises(KeyboardInterrupt):
            sweep(folders, [16, 32], out, text=text)
        assert len(json.loads((out / "length_sweep.json").read_text())["rows"]) == 2
        counted = []
        monkeypatch.setattr(
            length_sweep_cells.Cells,
            "_compute",
            lambda self, *arguments: counted.append(1) or compute(self, *arguments),
        )
        assert len(sweep(folders, [16, 32], out, text=text)) == 4
        assert len(counted) == 2

    def test_other_weights_are_another_cell(self, models, text, tmp_path):
        folder = shutil.copytree(models["cat"], tmp_path / "model")
        (before,) = sweep([folder], [32], tmp_path / "out", text=text)
        tokenizer = load_tokenizer(folder)
        export_model(tiny_model(257, seed=9), tokenizer, folder)
        (after,) = sweep([folder], [32], tmp_path / "out", text=text)
        assert before["perplexity"] != after["perplexity"]
