"""generate, length_sweep, report and quickstart on small models, through their own commands."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cat_lm.config import load_config
from cat_lm.data.opening import open_corpus
from cat_lm.export import export_model
from cat_lm.generate import continue_text
from cat_lm.pretrained.loading import load_model, load_tokenizer
from eval.samples import sample_continuations
from tests.calls import call_main
from tests.finished_runs import CONTEXT, finished_run, tiny_model


@pytest.fixture(scope="module")
def models(tmp_path_factory, tiny_corpus) -> list[Path]:
    """A CAT and a Pythia model, exported."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = load_tokenizer(tiny_corpus / "tokenizer")
    return [
        export_model(tiny_model(257, seed=1), tokenizer, folder / "cat"),
        export_model(tiny_model(257, seed=2, conv_type="none"), tokenizer, folder / "pythia"),
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_corpus) -> list[Path]:
    """Finished runs: CAT with RoPE, and Pythia."""
    folder = tmp_path_factory.mktemp("runs")
    cat = finished_run(folder / "cat", tiny_corpus, tiny_model(257, seed=1))
    pythia = tiny_model(257, seed=2, conv_type="none")
    return [cat, finished_run(folder / "pythia", tiny_corpus, pythia, conv_type="none")]


def command(monkeypatch, capsys, module: str, *arguments: object) -> tuple[int, str, str]:
    """Runs a command's main in this process; its exit code, stdout and stderr."""
    import importlib

    package = module in ("eval.length_sweep", "eval.report")
    main = importlib.import_module(f"{module}.__main__" if package else module).main
    return call_main(main, monkeypatch, capsys, module, *arguments)


class TestGenerate:
    def test_greedy_text_is_transformers_own(self, models, monkeypatch, capsys):
        arguments = (models[0], "The dog", "--greedy", "--max-new-tokens", 12)
        code, out, _ = command(monkeypatch, capsys, "cat_lm.generate", *arguments)
        assert code == 0
        model, tokenizer = load_model(models[0]), load_tokenizer(models[0])
        inputs = tokenizer("The dog", return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        assert out == tokenizer.decode(ids[0], skip_special_tokens=True) + "\n"

    def test_special_tokens_in_a_prompt_are_text(self, models, monkeypatch):
        model, tokenizer = load_model(models[0]), load_tokenizer(models[0])
        prompt = f"a{tokenizer.eos_token}b"
        seen = []

        def generate(input_ids, **_):
            seen.append(input_ids[0].tolist())
            return torch.cat([input_ids, torch.tensor([[ord("!")]])], dim=1)

        monkeypatch.setattr(model, "generate", generate)
        assert continue_text(model, tokenizer, prompt, 1, {}) == "!"
        samples = sample_continuations(
            model, tokenizer, [{"prompt": prompt}], max_new_tokens=1, seed=0
        )
        assert samples == [{"prompt": prompt, "continuation": "!"}]
        assert seen == [list(prompt.encode())] * 2, "the bytes of the text, no end of document"

    def test_seed_decides_the_samples(self, models, monkeypatch, capsys):
        def sampled(seed: int) -> str:
            arguments = (models[0], "A cat", "--seed", seed, "--num-samples", 2)
            code, out, _ = command(monkeypatch, capsys, "cat_lm.generate", *arguments)
            assert code == 0
            return out

        first = sampled(3)
        assert first == sampled(3)
        assert first != sampled(4)
        one, two = first.split("--- sample 2\n")
        assert one.removeprefix("--- sample 1\n") != two

    def test_prompt_from_standard_input_and_run_folder(self, runs, monkeypatch, capsys):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"from stdin")))
        arguments = (runs[0], "-", "--greedy", "--max-new-tokens", 2)
        code, out, _ = command(monkeypatch, capsys, "cat_lm.generate", *arguments)
        assert code == 0
        assert out.startswith("from stdin")

    def test_going_beyond_the_training_length_is_said(self, models, monkeypatch, capsys):
        arguments = (models[0], "x", "--max-new-tokens", CONTEXT)
        code, _, err = command(monkeypatch, capsys, "cat_lm.generate", *arguments)
        assert code == 0
        assert f"note: up to {CONTEXT + 1} tokens, but the model was trained on {CONTEXT}" in err
        arguments = (models[0], "x", "--max-new-tokens", CONTEXT - 1)
        assert command(monkeypatch, capsys, "cat_lm.generate", *arguments)[2] == ""

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda folder: folder / "absent", "no such folder"),
            (lambda folder: folder.parent, "not a model folder"),
            (lambda folder: without(folder, "model.safetensors"), "has config.json but no weights"),
            (lambda folder: without(folder, "tokenizer"), "tokenizer .*: missing"),
            (lambda folder: damaged(folder), "model.safetensors: has .* export.json lists"),
        ],
    )
    def test_bad_model_is_one_line(self, models, tmp_path, monkeypatch, capsys, change, message):
        folder = shutil.copytree(models[0], tmp_path / "copy")
        path = change(folder)
        code, out, err = command(monkeypatch, capsys, "cat_lm.generate", path, "x")
        assert (code, out) == (2, "")
        assert re.search(message, err)
        assert err.count("\n") == 1

    def test_bad_options_are_one_line(self, models, monkeypatch, capsys):
        for arguments, message in (
            ([" \n"], "prompt: is empty"),
            (["x", "--top-p", "1.5"], "--top-p: '1.5' must be from 0 to 1"),
            (["x", "--greedy", "--num-samples", "2"], "--num-samples"),
            (["x", "--device", "cuda:77"], "--device cuda:77"),
        ):
            code, _, err = command(monkeypatch, capsys, "cat_lm.generate", models[0], *arguments)
            assert code == 2
            assert message in err
            assert err.count("\n") == 1


def without(folder: Path, prefix: str) -> Path:
    for path in folder.glob(f"{prefix}*"):
        path.unlink()
    return folder


def damaged(folder: Path) -> Path:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    return folder


class TestReport:
    def test_quickstart_evaluates_and_reports(self, runs, tmp_path, monkeypatch, capsys):
        out = tmp_path / "report"
        arguments = (*runs, "--out", out, "--title", "Two <models>", "--max-tokens", 256)
        code, stdout, err = command(monkeypatch, capsys, "eval.quickstart", *arguments)
        assert code == 0, err
        assert stdout.rstrip().endswith("index.html")
        page = (out / "index.html").read_text(encoding="utf-8")
        assert "<h1>Two &lt;models&gt;</h1>" in page
        for heading in ("Results", "Learning", "context length", "Continuations", "filters"):
            assert re.search(f"<h2>[^<]*{heading}", page), heading
        assert "2.9000" in page, "the last validation loss"
        assert "unigram model" in page
        assert "training length" in page
        assert not re.search(r"(src|href)=\"https?:|@import|url\(http", page), "needs no network"
        for name in ("loss.png", "loss.svg", "perplexity_by_length.png", "filters_cat.png"):
            assert (out / name).stat().st_size > 1000, name
        assert not (out / "filters_pythia.png").exists()
        summary = json.loads((out / "summary.json").read_text())
        assert [run["val_loss"] for run in summary["runs"]] == pytest.approx([2.9, 2.9])
        assert [run["skipped_steps"] for run in summary["runs"]] == [1, 1]
        assert {row["length"] for row in summary["length_sweep"]} == {16, 32, 64, 128}
        with open(out / "summary.csv", encoding="utf-8") as file:
            assert [row["run"] for row in csv.DictReader(file)] == ["cat", "pythia"]
        samples = json.loads((runs[0] / "eval/samples.json").read_text())
        assert len(samples["samples"]) == 4
        assert all(sample["continuation"] for sample in samples["samples"])

    def test_samples_repeat_and_count_their_documents(self, runs, monkeypatch, capsys):
        arguments = (runs[0], "--count", 2, "--max-new-tokens", 8, "--prompt-tokens", 100)
        texts = []
        for _ in range(2):
            code, _, err = command(monkeypatch, capsys, "eval.samples", *arguments, "--seed", 5)
            assert code == 0
            texts.append(json.loads((runs[0] / "eval/samples.json").read_text()))
        assert texts[0]["samples"] == texts[1]["samples"]
        found = texts[0]["documents"]
        corpus = open_corpus(load_config(runs[0] / "config.yaml").data.folders[0], "validation")
        spans = [corpus.document(number) for number in range(corpus.num_documents)]
        lengths = [stop - start - 1 for start, stop in spans]  # Without their ends.
        parts = [found[name] for name in ("used", "too_short", "not_needed")]
        assert found["looked_at"] == len(lengths) == sum(parts)
        assert parts[:2] == [2, sum(n < 108 for n in lengths)]
        assert found["tokens_looked_at"] + found["tokens_left_out"] == corpus.num_tokens
        assert f"2 of {len(lengths)} documents are continued; left out: " in err

    def test_samples_of_data_with_another_tokenizer_begin_with_its_text(
        self, runs, tmp_path, prepare, monkeypatch, capsys
    ):
        """Its ids mean nothing, or other text, to the model's tokenizer."""
        text = tmp_path / "text.txt"
        beginnings = [f"Number {n} went to the market with seven birds." for n in range(40)]
        text.write_text("\n\n".join(beginnings), encoding="utf-8")
        data = prepare(
            tmp_path / "data",
            *("--source", "files", "--path", text, "--document-separator", r"\n\n"),
            *("--tokenizer", "train:sentencepiece:300", "--validation-fraction", 0.3),
            *("--workers", 1),
        )
        arguments = (runs[0], "--data", data, "--count", 2, "--prompt-tokens", 12)
        code, _, err = command(
            monkeypatch, capsys, "eval.samples", *arguments, "--max-new-tokens", 8
        )
        assert code == 0, err
        samples = json.loads((runs[0] / "eval/samples.json").read_text())["samples"]
        assert len(samples) == 2
        for sample in samples:
            assert any(b.startswith(sample["prompt"] + sample["reference"]) for b in beginnings)

    @pytest.mark.parametrize(
        ("module", "options", "message"),
        [
            ("eval.samples", ("--prompt-tokens", "1.5"), "'1.5' must be a whole number"),
            ("eval.samples", ("--max-new-tokens", 10**30), "--max-new-tokens: '1000"),
            ("eval.samples", ("--count", 10_000), "held-out documents have"),
            ("eval.quickstart", ("--out", "x", "--max-tokens", 0), "--max-tokens: '0' must be"),
        ],
    )
    def test_odd_arguments_are_one_line(
        self, runs, tmp_path, monkeypatch, capsys, module, options, message
    ):
        monkeypatch.chdir(tmp_path)
        code, out, err = command(monkeypatch, capsys, module, runs[0], *options)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("error: ") and message in err
        assert list(tmp_path.iterdir()) == []

    def test_folders_that_are_no_runs_are_one_line(self, runs, tmp_path, monkeypatch, capsys):
        for folder, message in (
            (tmp_path / "absent", "no such folder"),
            (runs[0] / "model", "has no config.yaml"),
        ):
            arguments = (folder, "--out", tmp_path / "out")
            code, _, err = command(monkeypatch, capsys, "eval.quickstart", *arguments)
            assert (code, err.count("\n")) == (2, 1) and message in err


@pytest.mark.parametrize(
    "module",
    [
        "cat_lm.export",
        "cat_lm.generate",
        "eval.landmark",
        "eval.length_sweep",
        "eval.quickstart",
        "eval.report",
        "eval.samples",
    ],
)
def test_help_imports_nothing_heavy(module):
    code = (
        f"import sys, runpy; sys.argv = ['x', '--help']\n"
        f"try: runpy.run_module('{module}', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as e: code = e.code\n"
        "heavy = {'torch', 'transformers', 'matplotlib'} & sys.modules.keys()\n"
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
