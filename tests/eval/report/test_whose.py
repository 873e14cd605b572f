"""Whose numbers are shown: of these weights, of a run that diverged, of which data."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from cat_lm.core.files import write_json
from cat_lm.data.opening import open_splits
from eval.common.runs import read_run, unigram_loss
from eval.report.page import _data_facts, _length_warning, _notes, loss_caveats
from tests.eval.report.results import (
    change_weights,
    edit_config,
    edit_export,
    report,
    results,
    samples,
    sweep,
    sweep_row,
    validations_end_with,
    zero_shot,
)
from tests.finished_runs import checkpoint, tiny_model
from tests.prepared_data import write_prepared


@pytest.fixture
def pair(runs, tmp_path) -> list[Path]:
    return [shutil.copytree(runs[name], tmp_path / name) for name in ("cat", "pythia")]


class TestDivergedRuns:
    """The last validation is the final one, whatever came before it."""

    def test_an_earlier_validation_is_not_its_final_one(self, pair, tmp_path, monkeypatch, capsys):
        validations_end_with(pair[0], None)  # its first, 4.4, is lower than the other's last
        validations_end_with(pair[1], 4.75)
        out = tmp_path / "out"
        assert report(monkeypatch, capsys, *pair, "--out", out) == (0, "")
        page = (out / "index.html").read_text(encoding="utf-8")
        lines = results(page)
        assert "<td>n/a (diverged)</td><td>n/a</td><td>n/a</td>" in lines["cat"]
        assert 'class="best"' not in lines["cat"]
        assert '<td class="best">4.7500</td>' in lines["pythia"]
        assert "Diverged: cat. Lowest held-out loss: pythia, 4.750" in page
        summary = json.loads((out / "summary.json").read_text())["runs"]
        assert [row["diverged"] for row in summary] == [True, False]
        keys = ("val_loss", "val_perplexity", "val_bits_per_byte")
        assert [summary[0][key] for key in keys] == [None] * 3
        assert len(read_run(pair[0]).validation) == 1, "the curve keeps what is finite"

    def test_run_with_a_finite_loss_before_or_after_is_not_ranked_by_it(
        self, pair, tmp_path, monkeypatch, capsys
    ):
        out = tmp_path / "out"
        validations_end_with(pair[0], None)
        assert report(monkeypatch, capsys, pair[0], "--out", out) == (0, "")
        page = (out / "index.html").read_text(encoding="utf-8")
        assert "Diverged: cat.</p>" in page and "No validation was made" not in page
        validations_end_with(pair[0], None, 4.25)
        assert report(monkeypatch, capsys, pair[0], "--out", out) == (0, "")
        page = (out / "index.html").read_text(encoding="utf-8")
        assert "4.2500" in results(page)["cat"] and "iverged" not in page


class TestWhichData:
    """Losses are ranked where they are of the same data, as the runs recorded them."""

    @pytest.fixture
    def prepared(self, tiny_corpus) -> str:
        """The fingerprint of what the runs' folder holds today."""
        return json.loads((tiny_corpus / "manifest.json").read_text())["fingerprint"]

    def test_folder_prepared_again_between_two_runs(
        self, pair, prepared, tiny_corpus, tmp_path, monkeypatch, capsys
    ):
        validations_end_with(pair[1], 2.5)
        out = tmp_path / "out"
        for fingerprint in (prepared, "e" * 64):
            edit_export(pair[0], data_fingerprint=fingerprint)
            assert report(monkeypatch, capsys, *pair, "--out", out) == (0, "")
            page = (out / "index.html").read_text(encoding="utf-8")
            is_same = fingerprint == prepared
            assert ('<td class="best">2.5000</td>' in results(page)["pythia"]) is is_same
            assert ('class="best"' in page.split("</table>")[0]) is is_same
            assert ("Lowest held-out loss: pythia" in page) is is_same
            assert ("unigram" in page) is is_same
            assert ("No value is marked as the best" in page) is not is_same
            assert bool(re.search(r"each trained on \S+ tokens of ", page)) is is_same
        named = f"{'e' * 16} (cat); {prepared[:16]} (pythia)."
        assert f"Not trained on the same data, by fingerprint: {named}" in page
        assert f"<dt>data {tiny_corpus}</dt>" in page
        absent = f"fingerprint {'e' * 16}; not found in {tiny_corpus}"
        assert re.search(rf"<dt>data of cat</dt>\s*<dd>{absent}</dd>", page)

    def test_data_that_nothing_tells_are_unknown(self, pair):
        for run in pair:
            edit_config(run, "path: .*", "path: gone")
        found = [read_run(run) for run in pair]
        assert [run.data for run in found] == [None, None]
        said = "Not known to be trained on the same data, by fingerprint: unknown (cat, pythia)."
        assert loss_caveats(found) == [said] and unigram_loss(found) is None
        assert _data_facts(found) == {"data of cat, pythia": "unknown"}
        assert loss_caveats(found[:1]) == [], "of one run nothing is compared"
        edit_export(pair[0], data_fingerprint="e" * 64)
        one = [read_run(run) for run in pair]
        named = f"{'e' * 16} (cat); unknown (pythia)"
        assert loss_caveats(one) == [said.replace("unknown (cat, pythia)", named)]

    def test_a_copy_elsewhere_has_the_unigram_model_s_loss(self, pair, prepared, tiny_corpus):
        edit_config(pair[0], "path: .*", "path: gone")
        edit_export(pair[0], data_fingerprint=prepared)
        found = [read_run(run) for run in pair]
        expected = json.loads((tiny_corpus / "manifest.json").read_text())["unigram_loss"]
        assert loss_caveats(found) == [] and unigram_loss(found) == expected

    def test_without_a_record_in_the_export_the_newest_checkpoint_says(
        self, run, prepared, tiny_corpus
    ):
        assert read_run(run).data == prepared, "neither says anything"
        model = tiny_model(257)
        for step in (6, 12):
            checkpoint(run, model, tiny_corpus / "tokenizer", step)
        assert read_run(run).data == "f" * 64 and not read_run(run).manifests
        state = run / "checkpoints/step-00000012/state.json"
        state.write_text(state.read_text().replace("f" * 64, "d" * 64))
        assert read_run(run).data == "d" * 64
        state.write_text("x" * state.stat().st_size)  # damaged, and as long as the marker says
        assert read_run(run).data == "f" * 64
        state.write_text("{}")  # of another size than the marker says: no complete checkpoint
        assert read_run(run).data == "f" * 64
        shutil.rmtree(run / "model")
        assert read_run(run).data == "f" * 64

    def test_a_mixture_is_known_by_its_parts_and_shares(self, run, tmp_path):
        for number in range(3):
            documents = [[*range(10 * number + 1, 10 * number + 9), 0]] * 4
            write_prepared(tmp_path / f"part{number}", documents)
        shares = {str(tmp_path / f"part{number}"): 1.0 + number for number in range(3)}
        edit_config(run, r"( *)path: .*\n *mixture: null", rf"\1mixture: {json.dumps(shares)}")
        config = read_run(run).config
        trained = open_splits(config)[0].fingerprint
        assert read_run(run).data == trained
        edit_export(run, data_fingerprint=trained)
        assert list(read_run(run).manifests) == list(shares)
        shutil.rmtree(tmp_path / "part1")
        assert read_run(run).data == trained and not read_run(run).manifests

    def test_losses_of_more_and_of_less_held_out_text_are_not_ranked(self, pair):
        found = [read_run(run) for run in pair]
        assert loss_caveats(found) == []
        edit_config(pair[1], r"(validation:\n.*\n *max_tokens): .*", r"\1: 64")
        edit_config(pair[0], r"(validation:\n.*\n *max_tokens): .*", r"\1: null")
        said = "Perhaps not scored on as much held-out text: no limit (cat); 64 tokens (pythia)."
        assert loss_caveats([read_run(run) for run in pair]) == [said]
        # As many whole windows of 32 tokens.
        edit_config(pair[0], r"(validation:\n.*\n *max_tokens): .*", r"\1: 65")
        assert loss_caveats([read_run(run) for run in pair]) == []
        edit_config(pair[0], r"mask_documents: .*", "mask_documents: true")
        edit_config(pair[1], "context_length: 32", "context_length: 1024")
        edit_config(pair[1], r"(validation:\n.*\n *max_tokens): .*", r"\1: null")
        edit_config(pair[0], r"(validation:\n.*\n *max_tokens): .*", r"\1: null")
        assert loss_caveats([read_run(run) for run in pair]) == [
            "Not trained at one context length: 32 tokens (cat); 1,024 tokens (pythia).",
            "Documents of a window are not read alike: apart (cat); joined (pythia).",
        ]

    def test_other_budgets_are_said(self, pair):
        budgets = "The runs were not trained on equally many tokens."
        assert budgets not in _notes([read_run(run) for run in pair])
        lines = (pair[0] / "metrics.jsonl").read_text().splitlines(keepends=True)
        assert "val_loss" in lines[-1]
        # One was stopped before its last validation.
        (pair[0] / "metrics.jsonl").write_text("".join(lines[:-1]))
        notes = _notes([read_run(run) for run in pair])
        assert budgets in notes and notes[0].startswith("Best values are bold.")


class TestWhoseResults:
    """What is shown of a run was measured on the weights that it has."""

    @pytest.fixture
    def measured(self, run) -> Path:
        write_json(run / "zero_shot/zero_shot.json", zero_shot(run))
        write_json(run / "eval/length_sweep.json", sweep(sweep_row(run, "cat", 21.75)))
        write_json(run / "eval/samples.json", samples(run))
        return run

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({}, ""),
            ({"length": 64}, ""),
            ({"documents": "per-document"}, "in different windows"),
            (
                {"stride": 8, "tokens_sha256": "b" * 64},
                "on different tokens and in different windows",
            ),
            ({"dtype": "bfloat16"}, "in different arithmetic (dtype)"),
            ({"factor": 2.0}, "with different scaling factors"),
            ({"temperature_scope": "rotary"}, "with different temperature scopes"),
            ({"factor": 2.0, "temperature_scope": "rotary", "method": "pi"}, ""),
            ({"dtype": "bfloat16", "factor": 2.0, "temperature_scope": "rotary", "length": 64}, ""),
            (
                {"stride": 8, "dtype": "float16", "factor": 4.0},
                "in different windows, in different arithmetic (dtype) and with different scaling "
                "factors",
            ),
        ],
    )
    def test_other_arithmetic_and_scaling_are_said(self, change, said):
        row = {"length": 32, "method": "yarn", "tokens_sha256": "a", "stride": 32}
        row |= {"documents": "concatenated", "dtype": "float32", "factor": 1.0}
        row |= {"temperature_scope": "logits"}
        found = _length_warning([row, row | change])
        assert found == (f"The runs were scored {said}." if said else "")

    def test_rows_of_other_models_are_left_out_and_said(
        self, measured, runs, tmp_path, monkeypatch, capsys
    ):
        path = measured / "eval/length_sweep.json"
        values = json.loads(path.read_text())
        values["rows"] += [sweep_row(runs["mh"], "mh", 99.25)]
        write_json(path, values)
        out = tmp_path / "out"
        assert report(monkeypatch, capsys, measured, "--out", out) == (0, "")
        summary = json.loads((out / "summary.json").read_text())
        assert [row["perplexity"] for row in summary["length_sweep"]] == [21.75]
        page = (out / "index.html").read_text(encoding="utf-8")
        assert "rows of other weights in the sweeps of cat (mh)" in page and "99.25" not in page
        assert "21.75" in page and "oo(y):" in page

    def test_results_of_an_older_export_are_left_out_with_the_command(
        self, measured, tmp_path, monkeypatch, capsys
    ):
        change_weights(measured)
        (measured / "model" / "export.json").unlink()
        out = tmp_path / "out"
        assert report(monkeypatch, capsys, measured, "--out", out) == (0, "")
        page = (out / "index.html").read_text(encoding="utf-8")
        todo = "\n".join(re.findall(r'<div class="todo">.*?</div>', page, re.DOTALL))
        assert todo.count("measured on other weights") == 3
        for module in ("zero_shot", "length_sweep", "samples"):
            assert todo.count(f"python -m eval.{module} {measured}") == 1
        assert "21.75" not in page and "oo(y):" not in page
        summary = json.loads((out / "summary.json").read_text())
        assert summary["runs"][0]["zero_shot_average"] is None and not summary["length_sweep"]
        assert not (out / "perplexity_by_length.png").exists()


def test_sweep_of_several_runs_is_found_beside_them(pair, tmp_path, monkeypatch, capsys):
    """A run's own sweep comes first, and a damaged one beside the runs is nobody's."""
    rows = [sweep_row(run, run.name, value) for run, value in zip(pair, (20.5, 21.5), strict=True)]
    write_json(tmp_path / "both" / "length_sweep.json", sweep(*rows))
    write_json(tmp_path / "other" / "length_sweep.json", {"format": 1})
    write_json(pair[1] / "eval" / "length_sweep.json", sweep(sweep_row(pair[1], "own", 22.5)))
    out = tmp_path / "out"
    assert report(monkeypatch, capsys, *pair, "--out", out) == (0, "")
    found = json.loads((out / "summary.json").read_text())["length_sweep"]
    assert [(row["label"], row["perplexity"]) for row in found] == [("cat", 20.5), ("pythia", 22.5)]
    assert "rows of other weights" not in (out / "index.html").read_text(encoding="utf-8")
    change_weights(pair[0])
    (pair[0] / "model" / "export.json").unlink()
    assert not read_run(pair[0]).sweep
