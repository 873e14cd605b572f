"""eval.speed data: what is compared is equal, every part leaves its figures, targets are judged."""

from __future__ import annotations

import json

import pytest

from eval.speed.data import command as data
from eval.speed.data import load as data_load
from eval.speed.data import tokenization as data_tokenize
from eval.speed.data.text import chunks, documents, write_files
from tests.conftest import generated_text, write_jsonl

SMALL = ("--repeats", 1, "--text-mb", 1, "--prepare-mb", 1, "--batch-size", 2)
SMALL += ("--context-length", 16, "--loader-tokens", 5000, "--open-tokens", "2000,1500000000")


@pytest.fixture
def text(tmp_path):
    texts = [*generated_text(150), "</s><|endoftext|>", "a \u2581 sign", "", "x" * 3000]
    return write_jsonl(tmp_path / "text.jsonl", texts)


@pytest.fixture
def speed(command, monkeypatch):
    """Runs the command on few tokens; no option of a device, which data have none of."""
    for name in ("RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "1")  # so that they are put back
    monkeypatch.setattr(data_load, "CONSUMED_STEPS", 2)
    return lambda *arguments: command("data", *SMALL, *arguments)


def test_tokenization_is_compared_with_each_library(speed, text):
    code, record, shown, _ = speed(
        *("--parts", "tokenize", "--text", text),
        *("--tokenizer", "train:sentencepiece:400", "--tokenizer", "bytes"),
    )
    assert (code, record["benchmark"], record["refused"]) == (0, "data", [])
    assert set(record["libraries"]) == {"tokenizers", "sentencepiece", "transformers", "numpy"}
    part = record["tokenize"]
    assert part["documents"] == 153  # the empty one is left out, as the preparation does
    trained, plain = part["tokenizers"]
    assert list(trained["contenders"]) == ["cat_lm", "tokenizers", "sentencepiece"]
    assert list(plain["contenders"]) == ["cat_lm", "tokenizers"]
    assert plain["tokens"] == part["bytes"] + part["documents"]
    assert trained["documents_with_other_ids"] == {"tokenizers": 0, "sentencepiece": 0}
    names = [row["name"] for row in record["targets"]]
    assert names[0] == "train:sentencepiece:400: speed relative to tokenizers"
    assert "cat_lm relative to it" in shown
    assert "at least 0.85" in shown


def test_a_tokenizer_with_other_ids_is_refused_and_not_timed(speed, text, monkeypatch):
    real = data_tokenize._libraries

    def spoiled(folder):
        encode = real(folder)["tokenizers"]
        return {"tokenizers": lambda texts: [ids[::-1] for ids in encode(texts)]}

    monkeypatch.setattr(data_tokenize, "_libraries", spoiled)
    code, record, shown, errors = speed("--parts", "tokenize", "--text", text, "--tokenizer=bytes")
    assert code == 1
    assert record["tokenize"]["tokenizers"][0]["contenders"] == {}
    assert record["refused"][0]["tokenizer"] == "bytes"
    assert "refused: bytes: other ids" in shown
    assert "1 tokenizers are wrong" in errors
    assert record["targets"] == []


@pytest.mark.long
def test_the_preparation_runs_as_a_command(speed, text):
    code, record, shown, _ = speed(
        *("--parts", "prepare", "--text", text, "--tokenizer", "bytes", "--workers", "1,2")
    )
    assert code == 0
    part = record["prepare"]
    assert part["bytes"] >= 10**6
    assert [run["workers"] for run in part["runs"]] == [1, 2]
    assert record["targets"][0]["name"] == "prepare: 2 workers relative to 1"
    assert record["targets"][0]["at_least"] == 1.8
    assert "MB/s a worker" in shown


def test_the_loader_in_every_order_and_opening(speed, text):
    code, record, shown, _ = speed("--parts", "load,open")
    assert code == 0
    assert [row["case"] for row in record["load"]["cases"]] == list(data_load.CASES)
    for row in record["load"]["cases"]:
        assert 0 <= row["waiting_share"] <= 1
    small, large = record["open"]["corpora"]
    assert (small["shards"], large["shards"]) == (1, 3)
    assert (small["middle_step"], large["middle_step"]) == (31, 23_437_500)
    assert large["peak_bytes"] > large["added_bytes"] > 0
    assert len(record["targets"]) == len(data_load.CASES) + 6
    assert "1.5B tokens: MB of memory in all" in shown


def test_targets_are_met_or_not():
    parts = {
        "tokenize": {"tokenizers": [{"spec": "/a/x.json", "times_as_fast_as": {"t": 0.84}}]},
        "prepare": {
            "one": 1,
            "runs": [{"workers": 1, "times_as_fast": 1}, {"workers": 2, "times_as_fast": 1.8}],
        },
        "load": {"cases": [{"case": "stream", "waiting_share": 0.01}]},
        "open": {
            "corpora": [
                {"tokens": 1e9, "open_seconds": 2.1, "resume_seconds": 1.9, "peak_bytes": 201e6}
            ]
        },
    }
    assert [(row["name"], row["met"]) for row in data.targets(parts)] == [
        ("x.json: speed relative to t", False),
        ("prepare: 2 workers relative to 1", True),
        ("loader, stream: share of time waiting", False),
        ("1B tokens: seconds to open", False),
        ("1B tokens: seconds to open and resume", True),
        ("1B tokens: MB of memory in all", False),
    ]


def test_texts_are_limited_cut_into_chunks_and_repeated(text, tmp_path):
    texts = documents(str(text), 10**9)
    assert len(documents(str(text), 500)) < 10
    assert documents(str(text), 1) == texts[:1]
    assert [t for chunk in chunks(texts * 900) for t in chunk] == texts * 900
    assert len(chunks(texts * 900)) > 10
    size = write_files(texts[:3], 2000, 4, tmp_path / "files")
    written = [
        json.loads(line)["text"]
        for file in sorted((tmp_path / "files").iterdir())
        for line in file.read_text().splitlines()
    ]
    assert size == sum(len(t.encode()) for t in written) >= 2000
    assert len(set(written)) == len(written)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--text", "nowhere"), "nowhere"),
        (("--scratch", "nowhere"), "--scratch nowhere: no such folder"),
        (("--parts", "tokenise"), "'tokenise' is not one of tokenize"),
        (("--loader-tokens", 32), "--loader-tokens 32: must be more than a batch"),
        (("--parts", "tokenize", "--tokenizer", "nope"), "--tokenizer nope"),
        (("--workers", "1,0"), "'0' must be from 1 to 4,096"),
    ],
)
def test_bad_options(speed, arguments, named):
    code, record, _, errors = speed(*arguments)
    assert (code, record) == (2, None)
    assert named in errors.splitlines()[-1]
