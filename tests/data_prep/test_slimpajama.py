"""SlimPajama in the layouts in which it can be had, from the Hub and from a local copy alike."""

import json
import re

import pytest

from cat_lm.core.errors import UserError
from data_prep.sources.documents import Reading
from data_prep.sources.open import open_source
from tests.contracts.test_sources import sample, zst
from tests.data_prep.helpers import write_files
from tests.data_prep.hub_server import serving


def test_the_caches_revisions_are_not_mixed(tmp_path):
    files, _, _ = sample()
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
    write_files(tmp_path / "a", {"test/a.jsonl.zst": zst(range(3))})
    with pytest.raises(UserError, match="its files are all held out, none is for training"):
        open_source("slimpajama", str(tmp_path / "a"), Reading())
    write_files(tmp_path / "b", {"README.md": b"x"})
    with pytest.raises(UserError, match=r"no file of a known kind in it but descriptions"):
        open_source("slimpajama", str(tmp_path / "b"), Reading())


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
