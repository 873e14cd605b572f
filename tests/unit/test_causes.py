"""What libraries say of a failing file is the system's error again, and damage is none."""

from __future__ import annotations

import errno
import os
import shutil
from unittest import mock

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from cat_lm.core import folders
from cat_lm.core.errors import UserError, is_temporary
from cat_lm.core.files import causes_told, os_error
from cat_lm.pretrained.loading import load_model
from tests.tiny_models import cat_model

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
    "a copy": (
        shutil.Error([("a", "b", "[Errno 5] Input/output error: 'a'")]),
        errno.EIO,
    ),
    "Python": (OSError(errno.EIO, "Input/output error"), errno.EIO),
    "a header": (SafetensorError("Error while deserializing header: invalid header length"), None),
    "a shape": (RuntimeError("shape '[116]' is invalid for input of size (5) (99999999999)"), None),
    "what is ours": (OSError("a.pt was not stored as it is"), None),
}


@pytest.mark.parametrize("case", SAID)
def test_an_error_is_the_one_that_it_stands_for(case, tmp_path):
    error, number = SAID[case]
    path = tmp_path / "a"
    path.touch()
    cause = os_error(error, path)
    assert (cause and cause.errno) == number
    if cause is not None:
        assert cause.filename == str(path)
        assert is_temporary(cause) == (number not in (errno.ENOSPC, errno.EACCES))
    with pytest.raises(type(error) if cause is None else OSError) as caught, causes_told(path):
        raise error
    assert caught.value is error or caught.value.errno == number


def test_what_safetensors_takes_for_an_absent_file_is_looked_at(tmp_path):
    """It says so of every file that it cannot open."""
    path, error = tmp_path / "a", FileNotFoundError("No such file or directory: a")
    cause = os_error(error, path)
    assert cause.errno == errno.ENOENT and not is_temporary(cause)
    path.touch()
    assert is_temporary(os_error(error, path)), "it was there, and is there again"
    for number, passes in ((errno.ESTALE, True), (errno.EIO, True), (errno.EACCES, False)):
        failing = mock.Mock(side_effect=OSError(number, os.strerror(number), str(path)))
        with mock.patch("builtins.open", failing):
            cause = os_error(error, path)
        assert cause.errno == number and is_temporary(cause) == passes
    absent = os_error(SafetensorError("header too small"), tmp_path / "absent")
    assert absent is None, "a file that was to be written"


def test_the_libraries_still_say_it_so(tmp_path):
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


def test_weights_that_cannot_be_opened_for_a_while_are_no_damage(tmp_path):
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


@pytest.mark.parametrize(("number", "passes"), [(errno.ESTALE, True), (errno.EACCES, False)])
def test_a_folder_of_ours_that_cannot_be_removed_for_a_while(number, passes, tmp_path):
    folders.make_temporary(tmp_path / "a")
    failing = mock.Mock(side_effect=OSError(number, os.strerror(number)))
    (tmp_path / "a/part").mkdir()
    with mock.patch("shutil.rmtree", failing), pytest.raises(UserError) as caught:
        folders.remove_temporary(tmp_path / "a")
    assert is_temporary(caught.value) == passes
