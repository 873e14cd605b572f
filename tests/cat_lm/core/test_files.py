"""Files that are whole or absent, checksums, and what libraries say of a failing file."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from unittest import mock

import pytest
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from cat_lm.core.errors import UserError, is_temporary
from cat_lm.core.files import (
    SEAL,
    atomic_write,
    checksums,
    os_error,
    raising_os_errors,
    unseal,
    write_sealed,
    write_text,
)
from cat_lm.pretrained.loading import load_model
from tests.tiny_models import cat_model


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_replacement_that_fails_leaves_the_file(error, tmp_path):
    path = tmp_path / "a"
    write_text(path, "one")
    with pytest.raises(type(error)) as caught, atomic_write(path) as stream:
        stream.write("two")
        raise error
    assert path.read_text() == "one" and os.listdir(tmp_path) == ["a"]
    assert not isinstance(error, OSError) or caught.value.filename == str(path)


def test_file_is_on_the_disk_before_it_has_its_name(tmp_path):
    path, order = tmp_path / "a", []
    write_text(path, "one")
    real = os.fsync, os.replace

    def note(action: int, *given: object) -> None:
        order.append((action, path.read_text()))
        real[action](*given)

    with (
        mock.patch("os.fsync", lambda handle: note(0, handle)),
        mock.patch("os.replace", lambda *names: note(1, *names)),
    ):
        write_text(path, "two")
    # The file's own numbers, its name, and the folder's entries; until then the old one is there.
    assert order == [(0, "one"), (1, "one"), (0, "two")]


def test_checksums_are_those_of_whole_files(tmp_path):
    files = [tmp_path / str(size) for size in (0, 1, 5 << 20)]
    for file in files:
        file.write_bytes(os.urandom(int(file.name)))
    for algorithm, make in (("sha256", hashlib.sha256), ("xxh3_128", xxhash.xxh3_128)):
        seen = []
        found = checksums(files, algorithm, seen.append)
        assert found == {file: make(file.read_bytes()).hexdigest() for file in files}
        # Told of each piece, so that a huge file is no silence.
        assert seen.count(files[1]) == 1 and seen.count(files[2]) > 1
    assert checksums([], "sha256") == {}


def test_sealed_record_is_whole_until_a_value_changes(tmp_path):
    given = {"loss": 1.5, "lengths": (32, 64), "by_step": {10: 1.0, 9: 2.0}, "none": None}
    write_sealed(tmp_path / "cell.json", given)
    stored = json.loads((tmp_path / "cell.json").read_text())
    record, whole = unseal(stored)
    assert whole is True and SEAL not in record and record == json.loads(json.dumps(given))
    for changed in ({"loss": 1.25}, {"more": 1}, {SEAL: "0" * 64}):
        assert unseal(stored | changed)[1] is False
    assert unseal(record) == (record, False)


STALE = "Error while serializing: I/O error: Stale file handle (os error 116)"
# As safetensors 0.8, torch 2.13 and Python 3.11 say it; the number, or None where there is none.
SAID = {
    "safetensors writes": (SafetensorError(f'{STALE} at path "/a/.tmp1"'), errno.ESTALE),
    "it fills a disk": (
        SafetensorError("I/O error: No space left on device (os error 28)"),
        errno.ENOSPC,
    ),
    "torch maps": (
        RuntimeError("unable to open file <a> in read-only mode: Stale file handle (116)"),
        errno.ESTALE,
    ),
    "a copy": (shutil.Error([("a", "b", "[Errno 5] Input/output error: 'a'")]), errno.EIO),
    "Python": (OSError(errno.EIO, "Input/output error"), errno.EIO),
    "a header": (SafetensorError("Error while deserializing header: invalid header length"), None),
    "a shape": (RuntimeError("shape '[116]' is invalid for input of size (5) (99999999999)"), None),
    "what is ours": (OSError("a.pt was not stored as it is"), None),
}


@pytest.mark.parametrize("case", SAID)
def test_error_of_a_library_is_the_systems(case, tmp_path):
    error, number = SAID[case]
    path = tmp_path / "a"
    path.touch()
    cause = os_error(error, path)
    assert (cause and cause.errno) == number
    if cause is not None:
        assert cause.filename == str(path)
        assert is_temporary(cause) == (number != errno.ENOSPC)
    with (
        pytest.raises(type(error) if cause is None else OSError) as caught,
        raising_os_errors(path),
    ):
        raise error
    assert caught.value is error or caught.value.errno == number


def test_file_that_safetensors_takes_for_absent_is_looked_at(tmp_path):
    """It says so of every file that it cannot open."""
    path, error = tmp_path / "a", FileNotFoundError("No such file or directory: a")
    assert os_error(error, path).errno == errno.ENOENT
    path.touch()
    assert is_temporary(os_error(error, path)), "it was there, and is there again"
    failing = mock.Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO), str(path)))
    with mock.patch("builtins.open", failing):
        assert os_error(error, path).errno == errno.EIO


def test_libraries_still_say_it_so(tmp_path):
    """The cases above are made up where no file system fails; this is what they are made from."""
    tensors = {"x": torch.zeros(3)}
    with pytest.raises(SafetensorError) as caught:
        save_file(tensors, tmp_path / "absent/x")
    assert os_error(caught.value, tmp_path / "absent/x").errno == errno.ENOENT
    with pytest.raises(FileNotFoundError) as caught:
        safe_open(tmp_path / "x", framework="pt").__enter__()
    assert os_error(caught.value, tmp_path / "x").errno == errno.ENOENT
    (tmp_path / "from").mkdir()
    (tmp_path / "from/a").touch()
    stale = mock.Mock(side_effect=OSError(errno.ESTALE, "Stale file handle"))
    with pytest.raises(shutil.Error) as caught:
        shutil.copytree(tmp_path / "from", tmp_path / "to", copy_function=stale)
    assert os_error(caught.value, tmp_path / "to").errno == errno.ESTALE


def test_weights_that_cannot_be_opened_now_are_no_damage(tmp_path):
    folder = tmp_path / "model"
    cat_model().save_pretrained(folder)
    wrong = FileNotFoundError(f"No such file or directory: {folder / 'model.safetensors'}")
    with (
        mock.patch("transformers.modeling_utils.safe_open", side_effect=wrong),
        pytest.raises(UserError) as caught,
    ):
        load_model(folder)
    assert is_temporary(caught.value) and str(folder) in str(caught.value)
    (folder / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        load_model(folder)
    assert not is_temporary(caught.value)


def test_weights_that_are_not_there_are_no_temporary_error(tmp_path):
    cat_model().save_pretrained(tmp_path, max_shard_size="20KB")
    *_, last = sorted(tmp_path.glob("*.safetensors"))
    last.unlink()
    last.symlink_to("nowhere")
    with pytest.raises(UserError, match="no such file") as caught:
        load_model(tmp_path)
    assert not is_temporary(caught.value)
