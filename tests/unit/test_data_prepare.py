"""The preparation as a whole: same result for any number of workers, kills, errors, arguments."""

import collections
import errno
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from cat_lm.core.errors import UserError
from cat_lm.data.opening import open_corpus
from cat_lm.data.tokenizers import DocumentEncoder
from data_prep.assemble import output_folder
from data_prep.encode.encoding import Rules
from data_prep.sources.documents import Document
from tests.conftest import REPOSITORY, generated_text, many_texts, write_jsonl
from tests.prepared_data import digests


def flags(path, *more, tokenizer="bytes"):
    return ("--source", "files", "--path", path, "--tokenizer", tokenizer, *more)


def command(*arguments):
    return [sys.executable, "-m", "data_prep.prepare", *map(str, arguments)]


def run(*arguments):
    return subprocess.run(command(*arguments), cwd=REPOSITORY, capture_output=True, text=True)


def texts_of(folder, split):
    corpus = open_corpus(folder, split)
    encoder = DocumentEncoder(folder / "tokenizer", corpus.eod_id, corpus.vocab_size)
    for index in range(corpus.num_documents):
        ids = corpus.tokens(*corpus.document(index))
        assert ids[-1] == corpus.eod_id and (ids[:-1] != corpus.eod_id).all()
        yield encoder.decode(ids[:-1])


@pytest.mark.parametrize("tokenizer", ["bytes", "train:sentencepiece:400"])
def test_every_document_is_in_one_split_whole_and_in_order(
    tmp_path, prepare, many_documents, tokenizer
):
    out = prepare(tmp_path / "out", *flags(many_documents, tokenizer=tokenizer), "--workers", 1)
    expected = [text for text in many_texts() if text]
    held_out = list(texts_of(out, "validation"))
    assert held_out == [
        text for text in expected if Rules(0, 0.05).split_of(Document(text, "x")) == "validation"
    ]
    assert list(texts_of(out, "train")) == [
        text for text in expected if Rules(0, 0.05).split_of(Document(text, "x")) == "train"
    ]
    assert 90 < len(held_out) < 220
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["empty_documents"] == 2
    for split in ("train", "validation"):
        corpus = open_corpus(out, split)
        texts = list(texts_of(out, split))
        assert corpus.num_documents == len(texts)
        assert corpus.num_bytes == sum(len(text.encode()) for text in texts)
        assert manifest["sources"]["jsonl"][split] == {
            "documents": corpus.num_documents,
            "tokens": corpus.num_tokens,
            "bytes": corpus.num_bytes,
        }


def test_the_result_is_the_same_for_every_number_of_workers(tmp_path, many_documents):
    arguments = flags(many_documents, "--shard-tokens", 40_000, tokenizer="train:sentencepiece:400")
    scratch = tmp_path / "scratch"
    for workers, more in ((1, ()), (2, ("--scratch", scratch))):
        done = run(*arguments, "--out", tmp_path / str(workers), "--workers", workers, *more)
        assert done.returncode == 0, done.stderr
    assert len(digests(tmp_path / "1")) > 10
    assert digests(tmp_path / "1") == digests(tmp_path / "2")
    assert not list(scratch.iterdir())


def test_many_small_chunks_come_back_in_order(tmp_path, prepare, some_documents, monkeypatch):
    expected = digests(prepare(tmp_path / "1", *flags(some_documents, "--workers", 1)))
    monkeypatch.setattr("data_prep.encode.encoding.CHUNK_DOCUMENTS", 70)
    assert digests(prepare(tmp_path / "2", *flags(some_documents, "--workers", 2))) == expected


def read_only(patched):
    """Let the system say what it says of a disk that is only read."""

    def refuse(path, *_, **__):  # the kernel says so of files that are not there, too
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    patched.setattr(os, "access", lambda _, mode: not mode & os.W_OK)
    for name in ("unlink", "rmdir"):
        patched.setattr(os, name, refuse)


def test_what_a_kill_left_of_complete_data_goes_where_it_can(
    tmp_path, prepare, some_documents, capsys, monkeypatch
):
    given = flags(some_documents, "--workers", 1)
    with monkeypatch.context() as patched:
        patched.setattr(output_folder.OutputFolder, "tidy", lambda *_: None)
        out = prepare(tmp_path / "out", *given)
    assert (out / "unfinished/parts").is_dir()
    with monkeypatch.context() as patched:
        read_only(patched)
        prepare(out, *given)
    assert capsys.readouterr().out.endswith("nothing to do\n")
    assert (out / "unfinished/parts").is_dir()
    prepare(out, *given)
    assert not (out / "unfinished").exists()


def test_again_with_the_same_arguments_does_nothing(
    tmp_path, prepare, some_documents, capsys, monkeypatch
):
    out = prepare(tmp_path / "out", *flags(some_documents, "--workers", 1))
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    prepare(out, *flags(some_documents, "--workers", 2))
    assert capsys.readouterr().out.endswith(
        "already complete with these arguments, nothing to do\n"
    )
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before

    with monkeypatch.context() as patched:  # as where nothing can be written
        patched.delattr(output_folder.OutputFolder, "locked")
        read_only(patched)
        prepare(out, *flags(some_documents))
    with pytest.raises(UserError, match=r"made otherwise \(seed was 0, now 1\).*--overwrite"):
        prepare(out, *flags(some_documents, "--seed", 1))
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    old = digests(out)
    prepare(out, *flags(some_documents, "--seed", 1, "--overwrite", "--workers", 1))
    assert digests(out) != old
    prepare(out, *flags(some_documents, "--overwrite", "--workers", 1))
    assert digests(out) == old


def test_what_is_left_out_is_of_the_choice_that_is_kept(tmp_path, prepare, capsys):
    for name in ("a", "b", "gen/c"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        rows = many_texts(150 + 10 * len(name))
        write_jsonl(tmp_path / "in" / f"{name}.jsonl", rows)
    given = flags(tmp_path / "in", "--workers", 1)
    whole = prepare(tmp_path / "whole", *given)
    out = prepare(tmp_path / "out", *given, "--exclude", "gen/*,b.jsonl")
    (tmp_path / "same").mkdir()
    (tmp_path / "in/a.jsonl").rename(tmp_path / "same/a.jsonl")
    same = prepare(tmp_path / "alone", *flags(tmp_path / "same", "--workers", 1))
    (tmp_path / "same/a.jsonl").rename(tmp_path / "in/a.jsonl")
    manifests = [
        json.loads((folder / "manifest.json").read_text()) for folder in (whole, out, same)
    ]
    assert [made["arguments"]["exclude"] for made in manifests] == [
        None,
        ["b.jsonl", "gen/*"],
        None,
    ]
    assert manifests[1]["fingerprint"] == manifests[2]["fingerprint"] != manifests[0]["fingerprint"]
    # In another order it is the same choice; another one, and none, are refused.
    prepare(out, *given, "--exclude", "b.jsonl, gen/*")
    assert "already complete" in capsys.readouterr().out
    for other in ((), ("--exclude", "gen/*")):
        with pytest.raises(UserError, match=r"exclude was \[\"b\.jsonl\", \"gen/\*\"\], now"):
            prepare(out, *given, *other)


def test_changed_input_and_damaged_output_are_noticed_when_run_again(tmp_path, prepare):
    path = write_jsonl(tmp_path / "x.jsonl", generated_text(100))
    out = prepare(tmp_path / "out", *flags(path, "--workers", 1))
    whole = (out / "train-00000.bin").read_bytes()
    (out / "train-00000.bin").write_bytes(whole[:-2])
    with pytest.raises(UserError, match="the manifest says"):
        prepare(out, *flags(path))
    (out / "train-00000.bin").write_bytes(whole)
    path.write_bytes(path.read_bytes().replace(b"e", b"a", 1))  # names and sizes are what they were
    with pytest.raises(UserError, match=r"made otherwise \(source was"):
        prepare(out, *flags(path))
    write_jsonl(path, generated_text(101))
    with pytest.raises(UserError, match="made otherwise"):
        prepare(out, *flags(path))


def test_unigram_loss_is_that_of_add_one_smoothing(tiny_corpus):
    counts = [
        collections.Counter(
            open_corpus(tiny_corpus, split)
            .tokens(0, open_corpus(tiny_corpus, split).num_tokens)
            .tolist()
        )
        for split in ("train", "validation")
    ]
    total = counts[0].total() + 257
    loss = sum(n * -math.log((counts[0][token] + 1) / total) for token, n in counts[1].items())
    manifest = json.loads((tiny_corpus / "manifest.json").read_text())
    assert manifest["unigram_loss"] == pytest.approx(loss / counts[1].total(), rel=1e-12)


def test_manifest_has_the_keys_of_the_contract(tiny_corpus):
    manifest = json.loads((tiny_corpus / "manifest.json").read_text())
    assert set(manifest) >= {
        *("format_version", "tool_version", "source", "tokenizer", "dtype", "splits", "sources"),
        *("unigram_loss", "fingerprint"),
    }
    assert set(manifest["tokenizer"]) >= {"spec", "kind", "vocab_size", "eod_id", "sha256"}
    shard = manifest["splits"]["train"]["shards"][0]
    assert set(shard) == {"name", "documents", "tokens", "bytes", "bin_sha256", "idx_sha256"}
    for kind in ("bin", "idx"):
        data = (tiny_corpus / f"{shard['name']}.{kind}").read_bytes()
        assert hashlib.sha256(data).hexdigest() == shard[f"{kind}_sha256"]
    assert [path.name for path in tiny_corpus.glob(".*")] == [".verified.jsonl"]
    assert not (tiny_corpus / "unfinished").exists()


def test_the_split_is_a_hash_of_seed_and_text():
    texts = [str(number) for number in range(20_000)]
    first, second = (
        {text for text in texts if Rules(seed, 0.1).split_of(Document(text, "x")) == "validation"}
        for seed in (0, 1)
    )
    assert 1800 < len(first) < 2200
    assert 150 < len(first & second) < 260
    # Held-out documents of a smaller fraction are among those of a larger one.
    assert {
        text for text in texts if Rules(0, 0.05).split_of(Document(text, "x")) == "validation"
    } < first


def test_a_source_with_its_own_validation_split_uses_it(tmp_path, prepare):
    train, held_out = generated_text(60), generated_text(40, seed=9)
    (tmp_path / "held").mkdir()
    write_jsonl(tmp_path / "t.jsonl", train)
    write_jsonl(tmp_path / "held" / "v.jsonl", held_out)
    common = flags(tmp_path / "t.jsonl", "--validation-path", tmp_path / "held", "--workers", 1)
    out = prepare(tmp_path / "out", *common)
    assert list(texts_of(out, "train")) == train
    assert list(texts_of(out, "validation")) == held_out
    limits = ("--max-documents", 20, "--validation-fraction", 0.25)
    out = prepare(tmp_path / "limited", *common, *limits)
    assert list(texts_of(out, "train")) == train[:20]
    assert list(texts_of(out, "validation")) == held_out[:5]


def test_limits(tmp_path, prepare, many_documents):
    every = [text for text in many_texts() if text]
    out = prepare(tmp_path / "a", *flags(many_documents, "--max-documents", 100, "--workers", 1))
    found = [*texts_of(out, "train"), *texts_of(out, "validation")]
    assert sorted(found) == sorted(every[:100])
    out = prepare(tmp_path / "b", *flags(many_documents, "--max-bytes", 10_000, "--workers", 1))
    size = sum(open_corpus(out, split).num_bytes for split in ("train", "validation"))
    assert 10_000 <= size < 10_500


def test_few_documents_under_a_limit_are_those_of_the_wanted_sets(tmp_path, prepare):
    """Others before them were counted: then none was held out, which is an error."""
    records = [
        {"text": f"text {n}", "meta": {"redpajama_set_name": "AB"[n >= 20]}} for n in range(40)
    ]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    given = flags(tmp_path / "x.jsonl", "--sets", "B", "--max-documents", 10, "--workers", 1)
    for seed in range(3):
        out = prepare(tmp_path / f"out{seed}", *given, "--seed", seed)
        found = [text for split in ("train", "validation") for text in texts_of(out, split)]
        assert sorted(found) == [f"text {n}" for n in range(20, 30)]


@pytest.mark.parametrize("limit", [("--max-documents", 3), ("--max-bytes", 5)])
def test_files_behind_a_limit_are_not_encoded(tmp_path, prepare, limit):
    for split in ("train", "validation"):
        for number in range(6):
            file = tmp_path / "in" / split / f"chunk{number}" / "x.jsonl"
            file.parent.mkdir(parents=True)
            write_jsonl(file, [f"{number}a", f"{number}b"])
    common = ("--source", "slimpajama", "--path", tmp_path / "in", "--tokenizer", "bytes")
    common += ("--validation-fraction", 0.3, "--workers", 1, *limit)
    out = prepare(tmp_path / "out", *common, "--stage", "encode")
    # Units 0 to 5 are the files of train, 6 to 11 those of validation.
    assert [file.name for file in sorted((out / "unfinished/parts").glob("part-*.json"))] == [
        f"part-{number:05d}.json" for number in (0, 1, 6)
    ]
    prepare(out, *common)
    assert list(texts_of(out, "train")) == ["0a", "0b", "1a"]
    assert list(texts_of(out, "validation")) == ["0a"]


def test_large_vocabularies_go_to_disk_as_int32(tmp_path, prepare, some_documents):
    from tokenizers import Tokenizer, models

    vocab = {f"<{number}>": number for number in range(70_000)} | {"</s>": 70_000, "?": 70_001}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    out = prepare(
        tmp_path / "out",
        *flags(some_documents, "--workers", 1, tokenizer=tmp_path / "tokenizer.json"),
    )
    corpus = open_corpus(out, "train")
    assert corpus.manifest["dtype"] == "int32"
    assert corpus.tokens(0, 2).tolist() == [70_001, 70_000]


def test_help_is_quick_and_complete():
    start = os.times()
    done = run("--help")
    end = os.times()  # of work: a busy machine takes longer
    assert end.children_user + end.children_system < start.children_user + start.children_system + 2
    for flag in ("--source", "--path", "--tokenizer", "--out", "--workers", "--overwrite"):
        assert flag in done.stdout


def test_the_sample_in_slimpajamas_layout(tmp_path, prepare, shared_data):
    out = prepare(
        tmp_path / "out",
        *("--source", "slimpajama", "--path", shared_data / "slimpajama_sample"),
        *("--tokenizer", shared_data / "tokenizers" / "mistral_7b_v1.model"),
        *("--max-documents", 300, "--workers", 1),
    )
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["splits"]["train"]["documents"] == 300
    assert manifest["splits"]["validation"]["documents"] == 15
    assert all(name.startswith("RedPajama") for name in manifest["sources"])
    corpus = open_corpus(out, "train")
    assert np.max(corpus.tokens(0, corpus.num_tokens)) < 32_000


def test_a_small_held_out_part_is_warned_of(tmp_path, prepare, capsys):
    for name, count, size in (("few", 40, 40), ("one", 20, 20_000), ("enough", 200, 2000)):
        write = (f"document {number} ".ljust(size, "x") for number in range(count))
        lines = "".join(json.dumps({"text": text}) + "\n" for text in write)
        (tmp_path / f"{name}.jsonl").write_text(lines)
        prepare(tmp_path / name, *flags(tmp_path / f"{name}.jsonl", "--workers", 1))
        warned = re.findall("^warning: .*", capsys.readouterr().out, re.MULTILINE)
        if name == "enough":
            assert warned == []
        else:
            (line,) = warned
            what = "a single document" if name == "one" else r"\d documents"
            assert re.match(rf"warning: the validation split is {what} of [\d,]+ tokens", line)


def test_the_manifest_names_what_is_left_out_and_a_restart_does_not_change_it(
    tmp_path, prepare, many_documents
):
    (tmp_path / "in").mkdir()
    shutil.copy(many_documents, tmp_path / "in")
    (tmp_path / "in" / "b.csv").write_text("not read")
    (tmp_path / "in" / ".old").mkdir()
    (tmp_path / "in" / ".old" / "c.jsonl").write_text("not read")
    given = flags(tmp_path / "in", "--workers", 1)
    plain = json.loads(
        (prepare(tmp_path / "1", *flags(many_documents)) / "manifest.json").read_text()
    )
    assert "left_out" not in plain
    out = tmp_path / "in" / "out"  # below the input, where it is no text that is left out
    parts = "--scratch", tmp_path / "in" / ".parts"
    prepare(out, *given, *parts, "--stage", "encode", "--task", "0/2")
    found = json.loads((prepare(out, *given, *parts) / "manifest.json").read_text())
    reason = "left out, hidden or of no known kind (1 .csv, 1 folder)"
    assert found["left_out"] == [{"reason": reason, "files": 2, "names": [".old/", "b.csv"]}]
    assert found["splits"] == plain["splits"]
    assert digests(prepare(tmp_path / "2", *given)) == digests(out)
