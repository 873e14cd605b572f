"""WikiText as the harness reads it: the numbers of eval.zero_shot at the same length."""

from __future__ import annotations

import csv
import json

import pytest

from cat_lm.core.errors import UserError
from eval.length_sweep.sweep import sweep
from eval.zero_shot.run import Settings, run
from tests.eval.length_sweep.calls import command
from tests.zero_shot_rows import ROWS, write_rows

LENGTH = 64


@pytest.fixture
def pages(tmp_path):
    """Pages longer and shorter than the context, with what the detokeniser changes."""
    long, other = (ROWS["wikitext"][number]["page"] for number in (1, 2))
    # Two pages that begin with the same window would meet in the harness's cache of logits, which
    # then scores the second one's wrongly.
    rows = [{"page": long * 3}, {"page": " = Cat = \n short @-@ one 's \n"}, {"page": other * 2}]
    return write_rows(tmp_path / "rows", {"wikitext": rows})


@pytest.mark.parametrize("name", ["cat", "nope"])
def test_word_and_byte_perplexity_are_the_zero_shot_value(models, pages, tmp_path, name):
    settings = Settings(data_dir=pages, device="cpu", max_length=LENGTH, bootstrap_iterations=0)
    asked = run(models[name], ["wikitext"], tmp_path / "zero_shot", settings)
    metrics = asked["tasks"]["wikitext"]["metrics"]
    out = tmp_path / "sweep"
    rows = sweep([models[name]], [32, LENGTH], out, text="wikitext", data_dir=pages)
    short, row = rows
    for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert row[metric] == pytest.approx(metrics[metric], rel=1e-6), metric
        # A negative control: at another length the two are not the same.
        assert short[metric] != pytest.approx(metrics[metric], rel=1e-6)
    assert row["tokens"] == short["tokens"] and row["tokens_sha256"] == short["tokens_sha256"]
    assert (row["documents"], row["document_count"], row["groups"]) == ("pages", 3, 3)
    assert len(row["document_nlls"]) == 3 and sum(row["document_tokens"]) == row["tokens"]
    assert sum(row["document_nlls"]) / row["tokens"] == pytest.approx(row["loss"])
    with open(out / "length_sweep.csv", encoding="utf-8", newline="") as file:
        written = list(csv.DictReader(file))[1]
    for metric in ("word_perplexity", "byte_perplexity"):
        assert float(written[metric]) == row[metric]
    assert "wikitext.jsonl" in json.loads((out / "length_sweep.json").read_text())["text"]


def test_a_page_that_spells_the_prefix_token_is_one_document(models, tmp_path):
    text = "a cat <|endoftext|> sat on a mat and slept there " * 2
    folder = write_rows(tmp_path / "rows", {"wikitext": [{"page": text}, {"page": "x" * 40}]})
    [row] = sweep([models["cat"]], [32], tmp_path / "out", text="wikitext", data_dir=folder)
    assert (row["document_count"], row["groups"]) == (2, 2)


def test_no_page_as_long_as_the_length(models, pages, tmp_path):
    with pytest.raises(UserError, match="too short for length 4096: the longest document has"):
        sweep([models["cat"]], [4096], tmp_path / "out", text="wikitext", data_dir=pages)


def test_what_is_missing_or_contradicts_is_one_line(models, pages, tmp_path, monkeypatch, capsys):
    base = (models["cat"], "--out", tmp_path / "out", "--lengths", "64", "--text")
    wikitext = (*base, "wikitext", "--data-dir")
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        ((*wikitext, tmp_path / "no"), f"--data-dir {tmp_path / 'no'}: no such folder"),
        ((*wikitext, tmp_path / "empty"), "wikitext.jsonl: missing; one JSON row per line"),
        ((*base, "book.txt", "--data-dir", pages), "only with --text wikitext"),
        ((*wikitext, pages, "--max-tokens", "90"), "--max-tokens 90: not with --text wikitext"),
        ((*wikitext, pages, "--documents", "concatenated"), "--documents concatenated: not with"),
        ((*wikitext, pages, "--document-separator", "x"), "--document-separator x: not with"),
    ):
        code, _, err = command(monkeypatch, capsys, *arguments)
        assert (code, err.count("\n")) == (2, 1) and message in err, err


def test_a_hub_that_cannot_be_reached_names_the_way_out(models, tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr("eval.zero_shot.tasks.sources.newest_commit", refuse)
    arguments = (models["cat"], "--out", tmp_path, "--lengths", "64", "--text", "wikitext")
    code, _, err = command(monkeypatch, capsys, *arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert "cannot be had from the Hub (no network)" in err
    assert "--data-dir DIR (DIR/wikitext.jsonl)" in err and "eval.zero_shot --prefetch DIR" in err


def test_without_the_harness(models, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    arguments = (models["cat"], "--out", tmp_path, "--lengths", "64", "--text", "wikitext")
    code, _, err = command(monkeypatch, capsys, *arguments)
    assert (code, err.count("\n")) == (2, 1) and "pip install -e '.[eval]'" in err
