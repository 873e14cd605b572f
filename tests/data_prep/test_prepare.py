"""The preparation as a whole: its result for any number of workers, its limits, its repetition."""

import collections
import errno
import json
import math
import os
import re

import pytest

from cat_lm.core.errors import UserError
from cat_lm.data.opening import open_corpus
from cat_lm.data.packing import PackedWindows
from data_prep.assemble import output_folder
from data_prep.encode import encoding, estimate
from data_prep.encode.encoding import Rules
from data_prep.sources.documents import Document
from tests.conftest import generated_text, many_texts, write_jsonl
from tests.data_prep.helpers import (
    flags,
    json_lines,
    made,
    manifest_of,
    run,
    texts_of,
    write_files,
)
from tests.prepared_data import digests


def held_out(texts, seed=0, fraction=0.05):
    rules = Rules(seed, fraction)
    return [text for text in texts if rules.split_of(Document(text, "x")) == "validation"]


@pytest.mark.parametrize("tokenizer", ["bytes", "train:sentencepiece:400"])
def test_every_document_is_in_one_split_whole_and_in_order(
    tmp_path, prepare, some_documents, tokenizer
):
    out = prepare(tmp_path / "out", *flags(some_documents, tokenizer=tokenizer))
    expected = [text for text in many_texts(500) if text]
    validation = held_out(expected)
    assert list(texts_of(out, "validation")) == validation and 10 < len(validation) < 50
    assert list(texts_of(out, "train")) == [t for t in expected if t not in validation]
    manifest = manifest_of(out)
    assert manifest["empty_documents"] == 2
    for split in ("train", "validation"):
        corpus, texts = open_corpus(out, split), list(texts_of(out, split))
        assert corpus.num_documents == len(texts)
        assert corpus.num_bytes == sum(len(text.encode()) for text in texts)
        counts = {"documents": len(texts), "tokens": corpus.num_tokens, "bytes": corpus.num_bytes}
        assert manifest["sources"]["jsonl"][split] == counts


def test_result_is_the_same_for_every_number_of_workers(tmp_path, prepare, many_documents):
    given = flags(many_documents, "--shard-tokens", 40_000, tokenizer="train:sentencepiece:400")
    one = digests(prepare(tmp_path / "1", *given))
    assert len(one) > 10
    scratch = ("--scratch", tmp_path / "scratch")
    done = run(*given, "--out", tmp_path / "2", "--workers", 2, *scratch)
    assert done.returncode == 0, done.stderr
    assert digests(tmp_path / "2") == one
    assert not list((tmp_path / "scratch").iterdir())


def test_small_chunks_come_back_in_order(tmp_path, prepare, some_documents, monkeypatch):
    expected = digests(prepare(tmp_path / "1", *flags(some_documents)))
    monkeypatch.setattr(encoding, "CHUNK_DOCUMENTS", 70)
    assert digests(prepare(tmp_path / "2", *flags(some_documents))) == expected


def read_only(patched):
    """Let the system answer as for a disk that is only read."""

    def refuse(path, *_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    patched.setattr(os, "access", lambda _, mode: not mode & os.W_OK)
    patched.setattr(output_folder, "take_lock", refuse)
    for name in ("unlink", "rmdir", "mkdir"):
        patched.setattr(os, name, refuse)


def test_again_with_the_same_arguments_does_nothing(
    tmp_path, prepare, some_documents, capsys, monkeypatch
):
    out = prepare(tmp_path / "out", *flags(some_documents))
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    prepare(out, *flags(some_documents, "--workers", 2))
    assert capsys.readouterr().out.endswith("complete with these arguments, nothing to do\n")
    with monkeypatch.context() as patched:
        read_only(patched)
        prepare(out, *flags(some_documents))
    with pytest.raises(UserError, match=r"made otherwise \(seed was 0, now 1\).*--overwrite"):
        prepare(out, *flags(some_documents, "--seed", 1))
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    old = digests(out)
    prepare(out, *flags(some_documents, "--seed", 1, "--overwrite"))
    assert digests(out) != old
    prepare(out, *flags(some_documents, "--overwrite"))
    assert digests(out) == old


def test_left_over_of_a_kill_beside_complete_data_is_removed(
    tmp_path, prepare, some_documents, monkeypatch
):
    with monkeypatch.context() as patched:
        patched.setattr(output_folder.OutputFolder, "remove", lambda *_: None)
        out = prepare(tmp_path / "out", *flags(some_documents))
    assert (out / "unfinished/parts").is_dir()
    with monkeypatch.context() as patched:
        read_only(patched)
        prepare(out, *flags(some_documents))
    prepare(out, *flags(some_documents))
    assert not (out / "unfinished").exists()


def test_changed_input_and_damaged_output_are_noticed(tmp_path, prepare, capsys):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        path = write_jsonl(tmp_path / folder / "x.jsonl", generated_text(100))
    out = prepare(tmp_path / "out", *flags(tmp_path / "a"))
    prepare(out, *flags(tmp_path / "b"))
    assert "already complete" in capsys.readouterr().out, "the place decides nothing"
    whole = (out / "train-00000.bin").read_bytes()
    (out / "train-00000.bin").write_bytes(whole[:-2])
    with pytest.raises(UserError, match="the manifest says"):
        prepare(out, *flags(tmp_path / "b"))
    (out / "train-00000.bin").write_bytes(whole)
    path.write_bytes(path.read_bytes().replace(b"e", b"a", 1))  # names and sizes are what they were
    with pytest.raises(UserError, match=r"made otherwise \(source was"):
        prepare(out, *flags(tmp_path / "b"))


def test_unigram_loss_is_that_of_add_one_smoothing(tiny_corpus):
    corpora = [open_corpus(tiny_corpus, split) for split in ("train", "validation")]
    counts = [collections.Counter(c.tokens(0, c.num_tokens).tolist()) for c in corpora]
    total = counts[0].total() + 257
    loss = sum(n * -math.log((counts[0][token] + 1) / total) for token, n in counts[1].items())
    found = manifest_of(tiny_corpus)["unigram_loss"]
    assert found == pytest.approx(loss / counts[1].total(), rel=1e-12)
    assert [path.name for path in tiny_corpus.glob(".*")] == [".verified.jsonl"]


def test_split_is_a_hash_of_seed_and_text():
    texts = [str(number) for number in range(20_000)]
    first, second = (set(held_out(texts, seed, 0.1)) for seed in (0, 1))
    assert 1800 < len(first) < 2200 and 150 < len(first & second) < 260
    # Held-out documents of a smaller fraction are among those of a larger one.
    assert set(held_out(texts, 0, 0.05)) < first


def test_own_validation_text_is_held_out_and_limited(tmp_path, prepare):
    train, own = generated_text(60), generated_text(40, seed=9)
    files = {"t.jsonl": json_lines(train), "held/v.jsonl": json_lines(own)}
    write_files(tmp_path, files)
    common = flags(tmp_path / "t.jsonl", "--validation-path", tmp_path / "held")
    out = prepare(tmp_path / "out", *common)
    assert (list(texts_of(out, "train")), list(texts_of(out, "validation"))) == (train, own)
    limits = ("--max-documents", 20, "--validation-fraction", 0.25)
    out = prepare(tmp_path / "limited", *common, *limits)
    assert (list(texts_of(out, "train")), list(texts_of(out, "validation"))) == (
        train[:20],
        own[:5],
    )


def test_limits_end_the_input(tmp_path, prepare, some_documents):
    every = [text for text in many_texts(500) if text]
    out = prepare(tmp_path / "a", *flags(some_documents, "--max-documents", 100))
    assert sorted([*texts_of(out, "train"), *texts_of(out, "validation")]) == sorted(every[:100])
    out = prepare(tmp_path / "b", *flags(some_documents, "--max-bytes", 10_000))
    size = sum(open_corpus(out, split).num_bytes for split in ("train", "validation"))
    assert 10_000 <= size < 10_500


def test_few_documents_under_a_limit_are_those_of_the_wanted_sets(tmp_path, prepare):
    rows = [
        json_lines([f"text {n}"], meta={"redpajama_set_name": "AB"[n >= 20]}) for n in range(40)
    ]
    write_files(tmp_path, {"x.jsonl": b"".join(rows)})
    given = flags(tmp_path / "x.jsonl", "--sets", "B", "--max-documents", 10)
    for seed in range(3):
        out = prepare(tmp_path / f"out{seed}", *given, "--seed", seed)
        found = [text for split in ("train", "validation") for text in texts_of(out, split)]
        assert sorted(found) == [f"text {n}" for n in range(20, 30)]


@pytest.mark.parametrize("limit", [("--max-documents", 3), ("--max-bytes", 5)])
def test_files_behind_a_limit_are_not_encoded(tmp_path, prepare, limit):
    splits = [(split, n) for split in ("train", "validation") for n in range(6)]
    files = {f"in/{s}/chunk{n}/x.jsonl": json_lines([f"{n}a", f"{n}b"]) for s, n in splits}
    write_files(tmp_path, files)
    common = ("--source", "slimpajama", "--path", tmp_path / "in", "--tokenizer", "bytes")
    common += ("--validation-fraction", 0.3, "--workers", 1, *limit)
    out = prepare(tmp_path / "out", *common, "--stage", "encode")
    # Units 0 to 5 are the files of train, 6 to 11 those of validation.
    records = sorted(file.name for file in (out / "unfinished/parts").glob("part-*.json"))
    assert records == [f"part-{number:05d}.json" for number in (0, 1, 6)]
    prepare(out, *common)
    assert list(texts_of(out, "train")) == ["0a", "0b", "1a"]
    assert list(texts_of(out, "validation")) == ["0a"]


def test_of_few_documents_one_is_held_out_and_one_kept(tmp_path, prepare):
    (tmp_path / "x.txt").write_text("one document\n\nor two\n\nor three\n\nor four")
    for seed, fraction in ((0, 0.01), (3, 0.99)):
        chosen = ("--validation-fraction", fraction, "--seed", seed)
        given = flags(tmp_path / "x.txt", "--document-separator", r"\n\n", *chosen)
        out = prepare(tmp_path / f"out{seed}", *given)
        counts = [len(list(texts_of(out, split))) for split in ("train", "validation")]
        assert counts == ([3, 1] if fraction < 0.5 else [1, 3])


def test_large_vocabularies_go_to_disk_as_int32(tmp_path, prepare, some_documents):
    from tokenizers import Tokenizer, models

    vocab = {f"<{number}>": number for number in range(70_000)} | {"</s>": 70_000, "?": 70_001}
    Tokenizer(models.WordLevel(vocab, unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    given = flags(some_documents, tokenizer=tmp_path / "tokenizer.json")
    corpus = open_corpus(prepare(tmp_path / "out", *given), "train")
    assert corpus.manifest["dtype"] == "int32"
    assert corpus.tokens(0, 2).tolist() == [70_001, 70_000]


@pytest.mark.long
def test_sample_of_slimpajama_with_its_tokenizer(tmp_path, prepare, shared_data):
    out = prepare(
        tmp_path / "out",
        *("--source", "slimpajama", "--path", shared_data / "slimpajama_sample"),
        *("--tokenizer", shared_data / "tokenizers" / "mistral_7b_v1.model"),
        *("--max-documents", 300, "--workers", 1),
    )
    manifest = manifest_of(out)
    documents = [manifest["splits"][s]["documents"] for s in ("train", "validation")]
    assert documents == [300, 15]
    assert all(name.startswith("RedPajama") for name in manifest["sources"])


def test_small_held_out_part_is_warned_of(tmp_path, prepare, capsys):
    for name, count, size in (("few", 40, 40), ("one", 20, 20_000), ("enough", 200, 2000)):
        texts = [f"document {number} ".ljust(size, "x") for number in range(count)]
        prepare(tmp_path / name, *flags(write_jsonl(tmp_path / f"{name}.jsonl", texts)))
        warned = re.findall("^warning: .*", capsys.readouterr().out, re.MULTILINE)
        what = {"few": r"\d documents", "one": "a single document"}.get(name)
        assert len(warned) == (what is not None)
        assert not what or re.match(rf"warning: the validation split is {what} of", warned[0])


def test_manifest_names_what_is_left_out_and_a_restart_does_not_change_it(
    tmp_path, prepare, some_documents
):
    files = {"b.csv": b"not read", ".old/c.jsonl": b"", "d.jsonl": json_lines(["left out"])}
    write_files(tmp_path / "in", {"a.jsonl": some_documents.read_bytes(), **files})
    given = flags(tmp_path / "in", "--exclude", "d.*")
    plain = manifest_of(prepare(tmp_path / "1", *flags(some_documents)))
    out = tmp_path / "in" / "out"  # below the input, where it is no text that is left out
    parts = "--scratch", tmp_path / "in" / ".parts"
    prepare(out, *given, *parts, "--stage", "encode", "--task", "0/2")
    found = manifest_of(prepare(out, *given, *parts))
    reason = "left out, hidden or of no known kind (1 .csv, 1 folder)"
    assert found["left_out"] == [{"reason": reason, "files": 2, "names": [".old/", "b.csv"]}]
    assert found["splits"] == plain["splits"] and "left_out" not in plain
    assert digests(prepare(tmp_path / "2", *given)) == digests(out)


def test_packing_plans_go_with_the_data_they_are_of(tmp_path, prepare):
    given = flags(write_jsonl(tmp_path / "x.jsonl", many_texts(300)))
    out = prepare(tmp_path / "out", *given)
    PackedWindows(open_corpus(out, "train"), 64)
    before = digests(out)
    with pytest.raises(UserError, match="the validation split comes out empty"):
        prepare(out, *given, "--overwrite", "--max-documents", 1)
    assert made(out) == {k: v for k, v in before.items() if k[0] != "."}
    prepare(out, *given, "--overwrite", "--seed", 1)
    assert not (out / "packing").exists()


def test_disk_that_would_not_do_is_refused_beforehand(
    tmp_path, prepare, many_documents, monkeypatch
):
    usage = collections.namedtuple("usage", "free")
    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda path: usage(100_000))
    with pytest.raises(UserError, match=r"about 0\.00\d GB are needed and 0\.000 GB are free"):
        prepare(tmp_path / "out", *flags(many_documents))
    assert not list((tmp_path / "out").glob("**/*.bin"))


@pytest.mark.parametrize("own_validation", [True, False])
def test_estimate_counts_what_is_held_out_and_writes_nothing(
    tmp_path, sets, prepare, capsys, own_validation
):
    given = flags(sets, "--tokens", "2K", "--validation-fraction", "0.3")
    if own_validation:
        given = ("--source", "slimpajama", *given[2:])
    prepare(tmp_path / "out", *given, "--estimate")
    assert not (tmp_path / "out").exists()
    printed = capsys.readouterr().out
    out = prepare(tmp_path / "out", *given)
    splits = json.loads((out / "manifest.json").read_text())["splits"]
    told = int(re.search(r"([0-9,]+) held-out ones come out", printed)[1].replace(",", ""))
    assert 0.5 < told / splits["validation"]["tokens"] < (6 if own_validation else 1.5)
    size = sum(file.stat().st_size for split in splits for file in out.glob(f"{split}-*"))
    told = float(re.search(r"disk: about ([0-9.]+) kB in", printed)[1]) * 1000
    assert 0.6 < told / size < 1.5
