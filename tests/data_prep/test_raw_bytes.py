"""A file's bytes as they are, in two or three splits."""

import json
import shutil

import numpy as np
import pytest

from cat_lm.core.errors import UserError
from cat_lm.core.folders import make_temporary, temporary_name
from cat_lm.data.opening import open_corpus
from data_prep.assemble import raw_bytes
from data_prep.check.findings import inspect
from data_prep.inspect import parse_arguments as inspect_arguments
from data_prep.prepare import parse_arguments
from eval.length_sweep.token_stream import split_stream

EOD = 256
TEXT = "Zwölf Boxkämpfer jagen Viktor quer über den großen Deich. ".encode() * 40
BORDERS = (0, 3, 1503, 2003)  # the first cut is in the middle of an ö


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "enwik"
    path.write_bytes(TEXT)
    return path


def words(file, out, splits="3,1500,500", **options):
    given = {"path": file, "splits": splits, "tokenizer": "bytes", "out": out} | options
    flags = ["--source", "raw-bytes"]
    for name, value in given.items():
        flags += [f"--{name}", str(value)] if value is not None else []
    return flags


def run(file, out, *given, **options):
    raw_bytes.prepare(parse_arguments(words(file, out, *given, **options)))
    return out


def refused(file, out, *given, **options):
    with pytest.raises(UserError) as error:
        run(file, out, *given, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_splits_are_the_bytes_that_are_named(file, tmp_path, capsys):
    out = run(file, tmp_path / "out")
    said = capsys.readouterr().out
    assert "test: 1 documents, 501 tokens, 500 bytes of text, 1.00 bytes a token, 1 shards" in said
    assert f"left out: the last {len(TEXT) - 2003:,} bytes of {file}" in said
    for split, start, stop in zip(
        ("train", "validation", "test"), BORDERS, BORDERS[1:], strict=False
    ):
        corpus = open_corpus(out, split)
        tokens = corpus.tokens(0, corpus.num_tokens)
        assert tokens[-1] == EOD and bytes(tokens[:-1].tolist()) == TEXT[start:stop]
        assert (corpus.num_bytes, corpus.num_documents) == (stop - start, 1)
    manifest = json.loads((out / "manifest.json").read_text())
    counts = np.bincount(np.frombuffer(TEXT[:3], np.uint8), minlength=257) + 1.0
    counts[EOD] += 1
    seen = np.log(counts / counts.sum())
    expected = -np.mean([*(seen[byte] for byte in TEXT[3:1503]), seen[EOD]])
    assert manifest["unigram_loss"] == pytest.approx(expected)
    assert manifest["arguments"]["source"]["splits"] == {
        "train": 3,
        "validation": 1500,
        "test": 500,
    }
    run(file, out)
    assert "already complete with these arguments" in capsys.readouterr().out


@pytest.mark.long
def test_prepared_bytes_are_inspected_and_scored(file, tmp_path, capsys):
    out = run(file, tmp_path / "out")
    inspect(inspect_arguments([str(out), "--workers", "1"]))
    said = capsys.readouterr().out
    assert "intact" in said and "test: tokens in a document" in said
    from cat_lm.pretrained.loading import load_tokenizer

    stream = split_stream(out, load_tokenizer(out / "tokenizer"), split="test")
    assert stream.num_bytes == 500 and stream.source == f"{out} (test split)"
    damaged = next(out.glob("test-*.bin"))
    damaged.write_bytes(damaged.read_bytes()[:-2] + b"\0\0")
    with pytest.raises(UserError, match="its SHA-256 is not the manifest's"):
        inspect(inspect_arguments([str(out), "--workers", "1"]))


def test_two_splits_and_none_of_the_third(file, tmp_path):
    out = run(file, tmp_path / "out", "2k,100")
    assert open_corpus(out, "validation").num_bytes == 100
    with pytest.raises(UserError, match="no split 'test'; there are: train, validation"):
        open_corpus(out, "test")


def test_what_a_kill_left_is_removed_and_what_others_made_is_not(file, tmp_path):
    left = temporary_name(tmp_path / "out", "tmp")
    make_temporary(left)
    (left / "half").write_text("")
    out = run(file, tmp_path / "out")
    assert not left.exists()
    assert "holds data made otherwise" in refused(file, out, "10,10,10")
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine").write_text("")
    assert "is not empty; choose another folder" in refused(file, other)
    assert [path.name for path in other.iterdir()] == ["mine"]
    shutil.rmtree(out)
    out.mkdir()
    assert open_corpus(run(file, out), "train").num_bytes == 3
