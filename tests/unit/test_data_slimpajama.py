"""SlimPajama in the layouts in which it can be had, from the Hub and from a local copy alike."""

import json
import re

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from cat_lm.core.errors import UserError
from data_prep.sources.documents import Malformed, Reading
from data_prep.sources.open import open_source
from data_prep.sources.slimpajama import KNOWN_SETS
from tests.conftest import generated_text
from tests.hub_server import NAME, serving
from tests.prepared_data import digests
from tests.unit.test_data_prepare import texts_of

TEXTS = generated_text(240)
SETS = [KNOWN_SETS[index % len(KNOWN_SETS)] for index in range(len(TEXTS))]
SPLITS = {"train": range(200), "validation": range(200, 220), "test": range(220, 240)}
COMMON = {"README.md": b"# what it is", ".gitattributes": b"*.zst filter=lfs"}
LAYOUTS = ("original", "6B", "reupload", "by set")


def jsonl_zst(indices, named=True):
    records = (
        {"text": TEXTS[i], **({"meta": {"redpajama_set_name": SETS[i]}} if named else {})}
        for i in indices
    )
    return zstandard.compress("".join(json.dumps(r) + "\n" for r in records).encode())


def parquet(indices, as_text):
    metas = [{"redpajama_set_name": SETS[i]} for i in indices]
    columns = {
        "text": [TEXTS[i] for i in indices],
        "meta": [json.dumps(meta) for meta in metas] if as_text else metas,
        "__index_level_0__": list(indices),
    }
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink, row_group_size=30)
    return sink.getvalue().to_pybytes()


def files_of(layout):
    """The files of a repository, and the texts of its training and validation splits in order."""
    if layout == "original":
        files = {
            f"train/chunk{chunk}/example_train_{number}.jsonl.zst": jsonl_zst(
                range(start, start + 50)
            )
            for start, chunk, number in ((0, 1, 2), (50, 1, 10), (100, 2, 0), (150, 10, 0))
        }
        files["validation/chunk1/example_holdout_0.jsonl.zst"] = jsonl_zst(SPLITS["validation"])
        files["test/chunk1/example_holdout_0.jsonl.zst"] = jsonl_zst(SPLITS["test"])
    elif layout == "6B":
        files = {
            "data/train-00000-of-00002-ab2b35705f029d94.parquet": parquet(range(120), False),
            "data/train-00001-of-00002-f2ff493d6eb6da4e.parquet": parquet(range(120, 200), False),
            "data/validation-00000-of-00001-d5e1a2.parquet": parquet(SPLITS["validation"], False),
            "data/test-00000-of-00001-9f769cf7ce219017.parquet": parquet(SPLITS["test"], False),
        }
    elif layout == "reupload":
        files = {
            "data/train-00000-of-00250.parquet": parquet(range(120), True),
            "data/train-00001-of-00250.parquet": parquet(range(120, 200), True),
            "data/test-00000-of-00030.parquet": parquet(SPLITS["test"], True),
        }
    else:  # its records name no set
        files = {
            f"{split}/{name}/chunk_{index}.jsonl.zst": jsonl_zst(
                [i for i in SPLITS[split] if SETS[i] == name and i % 2 == index % 2], named=False
            )
            for split in SPLITS
            for name in KNOWN_SETS
            for index in (9, 10)
        }
        order = [
            [
                i
                for s in KNOWN_SETS
                for odd in (1, 0)
                for i in indices
                if (SETS[i], i % 2) == (s, odd)
            ]
            for indices in (SPLITS["train"], SPLITS["validation"])
        ]
        return {**COMMON, **files}, *order
    held_out = [] if layout == "reupload" else list(SPLITS["validation"])
    return {**COMMON, **files}, list(SPLITS["train"]), held_out


def write(folder, files):
    """A copy as the Hub's own library makes it: with hidden files of its own beside the data."""
    for name, data in {**files, ".cache/huggingface/download/train.jsonl": b"{"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def flags(path, *more):
    tokenizer = ("--tokenizer", "train:sentencepiece:300", "--workers", 1)
    return ("--source", "slimpajama", "--path", path, *tokenizer, *more)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_hub_and_a_copy_give_the_same_shards(tmp_path, prepare, monkeypatch, capsys, layout):
    files, train, held_out = files_of(layout)
    copy = write(tmp_path / "copy", files)
    with serving(dict(files), monkeypatch):
        prepare(tmp_path / "hub", *flags(f"hub:{NAME}@v1"))
    told = capsys.readouterr().out.splitlines()
    prepare(tmp_path / "local", *flags(copy))
    ours, theirs = digests(tmp_path / "local"), digests(tmp_path / "hub")
    assert ours.pop("manifest.json") != theirs.pop("manifest.json")
    assert ours == theirs and len(ours) > 6
    manifests = [
        json.loads((tmp_path / out / "manifest.json").read_text()) for out in ("hub", "local")
    ]
    for key in ("fingerprint", "splits", "sources", "input"):
        assert manifests[0][key] == manifests[1][key]
    assert set(manifests[0]["sources"]) == set(SETS)
    found = [list(texts_of(tmp_path / "hub", split)) for split in ("train", "validation")]
    notes = [line for line in told if line.startswith("held out: ")]
    if held_out:
        assert found == [[TEXTS[i] for i in train], [TEXTS[i] for i in held_out]]
        assert not notes
    else:
        assert sorted(found[0] + found[1]) == sorted(TEXTS[i] for i in train) and all(found)
        assert notes == [
            f"held out: 5% of the documents of hub:{NAME}@v1, by a hash of their text "
            "(--validation-fraction); it has no validation split"
        ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_estimate_of_every_layout(tmp_path, prepare, monkeypatch, capsys, layout):
    files, _, held_out = files_of(layout)
    copy = write(tmp_path / "copy", files)
    with serving(dict(files), monkeypatch):
        prepare(tmp_path / "out", *flags(f"hub:{NAME}@v1", "--estimate"))
    hub = capsys.readouterr().out.splitlines()
    prepare(tmp_path / "out", *flags(copy, "--estimate"))
    local = capsys.readouterr().out.splitlines()
    assert hub[:2] == local[:2]
    assert "training tokens" in hub[0] and hub[1].startswith("disk: about")
    assert sum(line.startswith("held out: ") for line in hub) == (not held_out)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_document_has_its_set(tmp_path, layout):
    files, train, held_out = files_of(layout)
    source = open_source("slimpajama", str(write(tmp_path, files)), Reading())
    found = [item for part in source.parts for item in source.read(part)]
    assert not any(isinstance(item, Malformed) for item in found)
    assert [item.text for item in found] == [TEXTS[i] for i in train + held_out]
    assert [item.set for item in found] == [SETS[i] for i in train + held_out]
    assert {item.split for item in found} == ({"train", "validation"} if held_out else {None})


def test_what_a_record_says_of_its_set_goes_before_the_folder(tmp_path):
    write(tmp_path, {"train/RedPajamaC4/chunk_1.jsonl.zst": jsonl_zst(range(7))})
    source = open_source("slimpajama", str(tmp_path), Reading())
    assert [item.set for part in source.parts for item in source.read(part)] == SETS[:7]


def test_some_of_the_files_are_a_source_too(tmp_path):
    files, _, _ = files_of("6B")
    write(tmp_path, files)
    for path in (tmp_path / "data", tmp_path / "data" / "*-00000-of-*.parquet"):
        source = open_source("slimpajama", str(path), Reading())
        splits = [part.split for part in source.parts]
        assert splits == [*["train"] * (2 if path.name == "data" else 1), "validation"]
        assert source.parts[0].name == "train-00000-of-00002-ab2b35705f029d94.parquet"


def test_the_caches_revisions_are_not_mixed(tmp_path):
    files, _, _ = files_of("6B")
    cache = tmp_path / "datasets--DKYoon--SlimPajama-6B"
    for name, data in files.items():
        (cache / "blobs").mkdir(parents=True, exist_ok=True)
        blob = cache / "blobs" / name.replace("/", "-")[-20:].removesuffix(".parquet")
        blob.write_bytes(data)
        link = cache / "snapshots" / "b5f90f4" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    with pytest.raises(UserError, match=r"is a cache of the Hub's; give .*snapshots/b5f90f4$"):
        open_source("slimpajama", str(cache), Reading())
    source = open_source("slimpajama", str(cache / "snapshots" / "b5f90f4"), Reading())
    assert len(source.parts) == 3 and source.has_validation


def test_folders_without_training_text_are_refused(tmp_path):
    write(tmp_path / "a", {"test/a.jsonl.zst": jsonl_zst(range(3))})
    with pytest.raises(UserError, match="its files are all held out, none is for training"):
        open_source("slimpajama", str(tmp_path / "a"), Reading())
    write(tmp_path / "b", {"README.md": b"x"})
    with pytest.raises(UserError, match=r"no file of a known kind in it but descriptions"):
        open_source("slimpajama", str(tmp_path / "b"), Reading())


def test_without_a_path_it_says_where_the_data_are():
    with pytest.raises(UserError) as error:
        open_source("slimpajama", None, Reading())
    message = str(error.value)
    assert message.startswith("--source slimpajama needs --path: hub:DKYoon/SlimPajama-6B ")
    assert "hub:gmongaras/SlimPajama-627B_Reupload " in message and "\n" not in message


def test_the_withdrawn_repository_names_its_copy(monkeypatch):
    with serving({}, monkeypatch), pytest.raises(UserError) as error:
        open_source("slimpajama", "hub:cerebras/SlimPajama-627B", Reading())
    message = str(error.value)
    assert message.startswith("--path hub:cerebras/SlimPajama-627B: cannot be read from the Hub")
    assert "hub:gmongaras/SlimPajama-627B_Reupload is a copy" in message and "\n" not in message


def test_files_that_tell_no_split_beside_train_are_left_out_and_named(tmp_path):
    """They were left out without a word: of a copy with one odd name, that may be nearly all."""
    for name in ("train/a.jsonl", "validation/b.jsonl", "test/c.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    assert open_source("slimpajama", str(tmp_path), Reading()).notes(0.05) == []
    for chunk in ("chunk1", "chunk2"):
        (tmp_path / chunk).mkdir()
        (tmp_path / chunk / "d.jsonl").write_text(json.dumps({"text": chunk}) + "\n")
    source = open_source("slimpajama", str(tmp_path), Reading())
    assert [part.name for part in source.parts] == ["train/a.jsonl", "validation/b.jsonl"]
    (line,) = source.notes(0.05)
    assert re.match(r"left out, no split in the name .* \(files: 2\): chunk1/d\.jsonl", line)
