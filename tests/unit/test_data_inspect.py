"""Inspection: what it shows of intact data, and that it notices whatever is damaged."""

import json
import shutil

import pytest

from cat_lm.errors import UserError
from data_prep.inspect import main
from data_prep.inspection import inspect


@pytest.fixture
def copy(tiny_corpus, tmp_path):
    return shutil.copytree(tiny_corpus, tmp_path / "data")


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


def test_the_first_document_is_shown_as_it_was(tiny_corpus, capsys):
    inspect(tiny_corpus, 1, True, None)
    shown = capsys.readouterr().out
    text = (tiny_corpus.parent / "text.txt").read_text()
    sample = shown.split("train document 0")[1].split("\n", 1)[1].split("[EOD")[0]
    assert sample.removesuffix(" …") in text


def flip(file, offset):
    data = bytearray(file.read_bytes())
    data[offset] ^= 0x01
    file.write_bytes(bytes(data))


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
    inspect(copy, 0, False, None)
    assert capsys.readouterr().out.endswith("intact: sizes and headers\n")
    with open(copy / "train-00000.bin", "ab") as stream:
        stream.write(b"\0\0")
    with pytest.raises(UserError, match="the manifest says"):
        inspect(copy, 0, False, None)


def change(copy, edit):
    manifest = json.loads((copy / "manifest.json").read_text())
    edit(manifest)
    (copy / "manifest.json").write_text(json.dumps(manifest))


def forge(copy, values):
    """Shards whose checksums are right, but whose tokens are not what the manifest says."""
    import numpy as np

    from cat_lm.data.corpus import fingerprint
    from cat_lm.files import sha256

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
        inspect(copy, 0, True, None)


def test_other_tokenizers_counts_and_fingerprints_are_noticed(copy):
    change(copy, lambda manifest: manifest.update(fingerprint="other"))
    with pytest.raises(UserError, match="fingerprint does not belong"):
        inspect(copy, 0, True, None)
    change(copy, lambda manifest: manifest["splits"]["train"].update(bytes=1))
    (copy / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="differs from the tokenizer that made the data"):
        inspect(copy, 0, True, None)
    (copy / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="no such file"):
        inspect(copy, 0, True, None)


def test_a_folder_that_is_not_prepared_data(tmp_path):
    with pytest.raises(UserError, match="no finished data"):
        inspect(tmp_path, 0, True, None)
