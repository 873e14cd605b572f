"""Inspection: what it shows of intact data, and that it notices whatever is damaged."""

import json
import shutil

import numpy as np
import pytest

from cat_lm.core.errors import UserError
from cat_lm.data.manifest import fingerprint
from data_prep.check import findings, integrity
from data_prep.inspect import main, parse_arguments
from tests.conftest import generated_text
from tests.prepared_data import write_shards


@pytest.fixture
def copy(tiny_corpus, tmp_path):
    return shutil.copytree(tiny_corpus, tmp_path / "data")


@pytest.fixture
def write_data(tiny_corpus, tmp_path):
    """Prepared data of exactly these texts, some documents a shard; `bytes` tokenizer."""

    def write(train, validation, shard_tokens=1000):
        folder = tmp_path / "written"
        shutil.copytree(tiny_corpus / "tokenizer", folder / "tokenizer")
        manifest = json.loads((tiny_corpus / "manifest.json").read_text())
        for split, texts in (("train", train), ("validation", validation)):
            documents = [[*text.encode(), 256] for text in texts]
            shards = write_shards(folder, split, documents, shard_tokens=shard_tokens)
            keys = ("documents", "tokens", "bytes")
            counts = {key: sum(shard[key] for shard in shards) for key in keys}
            manifest["splits"][split] = {**counts, "shards": shards}
        manifest["sources"] = {"txt": {"train": counts}}
        listed = [s for split in manifest["splits"].values() for s in split["shards"]]
        manifest["fingerprint"] = fingerprint(listed, manifest["tokenizer"]["sha256"])
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return folder

    return write


def inspect(folder, *flags):
    """Inspects in this process."""
    return findings.inspect(parse_arguments([str(folder), "--workers", "1", *map(str, flags)]))


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["inspect", *map(str, arguments)])
    main()


def test_intact_data(tiny_corpus, tmp_path, monkeypatch, capsys):
    run(monkeypatch, tiny_corpus, "--samples", 2, "--json", tmp_path / "found.json")
    shown = capsys.readouterr().out
    for part in ("bytes/token", "txt", "unigram loss", "[EOD 256]", "train document 0: tokens 0"):
        assert part in shown
    assert shown.endswith("intact: checksums, counts, EOD and ids\n")
    found = json.loads((tmp_path / "found.json").read_text())
    manifest = json.loads((tiny_corpus / "manifest.json").read_text())
    assert (found["intact"], found["problem"], found["manifest"]) == (True, None, manifest)
    buckets = found["document_lengths"]["train"]["buckets"]
    assert sum(buckets.values()) == manifest["splits"]["train"]["documents"]


def flip(file, offset):
    data = bytearray(file.read_bytes())
    data[offset] ^= 0x01
    file.write_bytes(bytes(data))


def test_samples_have_window_edges_and_ends_of_documents_marked(write_data, capsys):
    long = "".join(map(str, range(100, 300)))
    folder = write_data(train=["first", "second", "a third that goes on", long], validation=["x"])
    inspect(folder, "--samples", 4, "--context-length", 20, "--no-duplicates")
    shown = capsys.readouterr().out
    assert "train document 0: tokens 0 to 6, window 0\n[window 0]first[EOD 256]\n" in shown
    assert "windows 0 to 1\na third[window 1] that goes on[EOD 256]\n" in shown
    assert "train window 0: tokens 0 to 20\n[window 0]first[EOD 256]\nsecond[EOD 256]" in shown
    assert shown.count(" …\n") >= 1  # of the document that is too long to be shown
    inspect(folder, "--samples", 4, "--context-length", 1000, "--no-duplicates")
    shown = capsys.readouterr().out
    assert f"{long[:80]} … {long[-80:]}[EOD 256]" in shown


@pytest.mark.parametrize("name", ["train-00000.bin", "train-00000.idx", "validation-00000.bin"])
@pytest.mark.parametrize("offset", [100, -1])
def test_one_flipped_bit_is_noticed(copy, tmp_path, monkeypatch, capsys, name, offset):
    flip(copy / name, offset)
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, copy, "--json", tmp_path / "found.json")
    assert ended.value.code == 2
    complaint = capsys.readouterr().err.splitlines()
    assert complaint == [
        f"error: {copy / name}: its SHA-256 is not the manifest's; prepare the data again"
    ]
    assert json.loads((tmp_path / "found.json").read_text())["intact"] is False


def test_without_checksums_only_sizes_and_headers_count(copy, capsys):
    flip(copy / "train-00000.bin", 100)
    inspect(copy, "--no-checksums", "--no-duplicates")
    assert capsys.readouterr().out.endswith("intact: sizes and headers\n")
    with open(copy / "train-00000.bin", "ab") as stream:
        stream.write(b"\0\0")
    with pytest.raises(UserError, match="the manifest says"):
        inspect(copy, "--no-checksums", "--no-duplicates")


GONE = object()


@pytest.mark.parametrize("what", ["length", "pointer", "mark"])
def test_an_index_that_cannot_be_is_told_without_checksums_too(copy, what):
    data = bytearray((copy / "train-00000.idx").read_bytes())
    documents = int.from_bytes(data[18:26], "little")
    place = {"length": 34, "pointer": 34 + 4 * documents, "mark": 34 + 12 * documents}[what]
    data[place + 3] ^= 0x7F
    (copy / "train-00000.idx").write_bytes(bytes(data))
    with pytest.raises(UserError, match=r"train-00000\.idx: .*the index is damaged"):
        inspect(copy, "--no-checksums", "--samples", 2, "--no-duplicates")


def change(copy, edit):
    manifest = json.loads((copy / "manifest.json").read_text())
    edit(manifest)
    (copy / "manifest.json").write_text(json.dumps(manifest))


def forge(copy, values):
    """Shards whose checksums are right, but whose tokens are not what the manifest says."""
    from cat_lm.core.files import sha256

    file = copy / "train-00000.bin"
    tokens = np.fromfile(file, dtype="<u2")
    tokens[: len(values)] = values
    tokens.tofile(file)

    def edit(manifest):
        splits = manifest["splits"]
        splits["train"]["shards"][0]["bin_sha256"] = sha256(file)
        shards = [shard for split in splits.values() for shard in split["shards"]]
        manifest["fingerprint"] = fingerprint(shards, manifest["tokenizer"]["sha256"])

    change(copy, edit)


@pytest.mark.parametrize(
    ("values", "message"), [([300], "ids outside the vocabulary"), ([256], "EOD tokens for")]
)
def test_ids_and_eods_are_counted(copy, values, message):
    forge(copy, values)
    with pytest.raises(UserError, match=message):
        inspect(copy, "--no-duplicates")


def test_other_tokenizers_counts_and_fingerprints_are_noticed(copy):
    change(copy, lambda manifest: manifest.update(fingerprint="0" * 64))
    with pytest.raises(UserError, match="fingerprint does not belong"):
        inspect(copy, "--no-duplicates")
    change(copy, lambda manifest: manifest["splits"]["train"].update(bytes=1))
    (copy / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="differs from the tokenizer that made the data"):
        inspect(copy, "--no-duplicates")
    (copy / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="no such file"):
        inspect(copy, "--no-duplicates")


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        ("tokenizer", None, "tokenizer is null"),
        ("tokenizer.vocab_size", GONE, "has no tokenizer.vocab_size"),
        ("tokenizer.vocab_size", 10**30, "tokenizer.vocab_size is 1000"),
        ("tokenizer.eod_id", GONE, "has no tokenizer.eod_id"),
        ("tokenizer.eod_id", 300, "eod_id 300 must be below vocab_size 257"),
        ("tokenizer.eod_id", "256", 'tokenizer.eod_id is "256"'),
        ("splits", [], "splits is []"),
        ("splits.train", GONE, "has no splits.train"),
        ("splits.validation", GONE, "has no splits.validation"),
        ("splits.train", None, "splits.train is null"),
        ("splits.train.shards", None, "splits.train.shards is null"),
        ("splits.train.shards.0", 7, "splits.train.shards.0 is 7"),
        ("splits.train.shards.0.name", GONE, "has no splits.train.shards.0.name"),
        ("splits.train.shards.0.name", 7, "splits.train.shards.0.name is 7"),
        ("splits.train.shards.0.name", "../x", 'name is "../x": string should match pattern'),
        ("splits.train.shards.0.name", "validation-00000", "validation-00000 must stand once"),
        ("splits.train.shards.0.tokens", -1, "splits.train.shards.0.tokens is -1"),
        ("splits.train.shards.0.tokens", 3.5, "splits.train.shards.0.tokens is 3.5"),
        ("splits.train.shards.0.bin_sha256", "0x", 'bin_sha256 is "0x": string should match'),
        ("splits.train.tokens", 1, "splits.train.tokens is 1, its shards have"),
        ("fingerprint", "../../x", 'fingerprint is "../../x"'),
        ("dtype", "uint32", 'dtype is "uint32"'),
        ("unigram_loss", float("nan"), "is not JSON (NaN is no number"),
        ("sources", {"a": {"train": {"documents": 1}}}, "has no sources.a.train.tokens"),
        ("format_version", True, "format_version"),
        ("format_version", 2, "format_version is 2: should be less"),
    ],
)
def test_a_manifest_of_another_shape_is_one_line(copy, monkeypatch, capsys, keys, value, message):
    def edit(manifest):
        *path, last = (int(key) if key.isdigit() else key for key in keys.split("."))
        for key in path:
            manifest = manifest[key]
        if value is GONE:
            del manifest[last]
        else:
            manifest[last] = value

    change(copy, edit)
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, copy)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {copy}") and message in line


def test_all_damage_is_listed_and_workers_find_the_same(copy, monkeypatch, capsys):
    monkeypatch.setattr(integrity, "SMALL_BYTES", 0)
    for name in ("train-00000.bin", "validation-00000.idx"):
        flip(copy / name, 100)
    shown = []
    for workers in (1, 2):
        with pytest.raises(UserError, match=r"train-00000.bin: its SHA-256.*\(and 1 more"):
            inspect(copy, "--workers", workers)
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert shown[0].count("damaged: ") == 2
    assert f"damaged: {copy / 'validation-00000.idx'}: its SHA-256" in shown[0]


TWICE = ["a document that is there twice", "one that is not"]


def duplicates_of(folder, tmp_path, *flags):
    inspect(folder, "--samples", 0, "--json", tmp_path / "found.json", *flags)
    return json.loads((tmp_path / "found.json").read_text())["duplicates"]


def test_planted_duplicates_are_found(write_data, tmp_path, monkeypatch, capsys):
    train = [*generated_text(60), TWICE[0], *generated_text(60, seed=1), *TWICE]
    validation = [*generated_text(20, seed=2), TWICE[1], TWICE[1]]
    folder = write_data(train, validation)
    assert len(list(folder.glob("train-*.bin"))) > 5
    found = duplicates_of(folder, tmp_path)
    assert found["train"] == {"documents": 1, "tokens": len(TWICE[0]) + 1}
    assert found["validation"]["documents"] == 1
    assert found["across"] == {"documents": 2, "tokens": 2 * len(TWICE[1]) + 2}
    pair = {"document": 121, "same_as": 60, "tokens": len(TWICE[0]) + 1}
    assert found["examples"]["train"] == [pair]
    across = [(e["document"], e["same_as"]) for e in found["examples"]["across"]]
    assert across == [(20, 122), (21, 122)]
    shown = capsys.readouterr().out
    assert "train document 121 is train document 60 (31 tokens)" in shown
    assert "validation document 20 is train document 122 (16 tokens)" in shown
    with monkeypatch.context() as patch:
        patch.setattr(integrity, "SMALL_BYTES", 0)
        patch.setattr(integrity, "PART_DOCUMENTS", 30)
        assert duplicates_of(folder, tmp_path, "--no-checksums", "--workers", 2) == found
    for kind in ("across", "any"):
        with pytest.raises(SystemExit) as ended:
            run(monkeypatch, folder, "--samples", 0, "--fail-on-duplicates", kind)
        assert ended.value.code == 1
    assert capsys.readouterr().out.endswith("intact: checksums, counts, EOD and ids\n")


def test_duplicates_within_train_are_no_leak(write_data, monkeypatch):
    folder = write_data(["twice", "twice"], ["held out"])
    run(monkeypatch, folder, "--fail-on-duplicates", "across")
    for more, code in (((), 1), (("--no-duplicates",), 2)):
        with pytest.raises(SystemExit) as ended:
            run(monkeypatch, folder, "--fail-on-duplicates", "any", *more)
        assert ended.value.code == code


def test_equal_hashes_alone_are_no_duplicates(write_data, tmp_path, monkeypatch):
    folder = write_data(["aa", "ab", "aa", "abc"], ["ab", "b", "abc", "abc"])
    expected = duplicates_of(folder, tmp_path)
    same = integrity.hashlib.blake2b(b"", digest_size=8)
    monkeypatch.setattr(integrity.hashlib, "blake2b", lambda *_, **__: same)
    assert duplicates_of(folder, tmp_path) == expected


def test_an_empty_split_and_one_document(write_data, tmp_path, capsys):
    folder = write_data(["only this"], [])
    assert not inspect(folder, "--out", tmp_path / "pictures", "--fail-on-duplicates", "any")
    shown = capsys.readouterr().out
    assert "validation: no documents" in shown
    assert "only this[EOD 256]" in shown
    assert (tmp_path / "pictures" / "document_lengths.png").read_bytes().startswith(b"\x89PNG")


def test_quantiles_and_buckets_of_lengths(write_data, tmp_path):
    folder = write_data(["x" * (length - 1) for length in (2, 3, 4, 9)], ["y"], shard_tokens=5)
    inspect(folder, "--json", tmp_path / "found.json")
    lengths = json.loads((tmp_path / "found.json").read_text())["document_lengths"]["train"]
    assert lengths["quantiles"] == {"min": 2, "25%": 2, "50%": 3, "75%": 4, "max": 9}
    assert lengths["buckets"] == {"2": 2, "4": 1, "8": 1}
    assert lengths["mean"] == 4.5
