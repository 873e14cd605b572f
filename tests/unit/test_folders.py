"""A folder that cannot be written to ends a command before it works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cat_lm.core.errors import UserError
from cat_lm.core.folders import check_output

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {
    "eval.recall": ["theory"],
    "eval.length_sweep": ["nowhere", "--text", "nowhere", "--lengths", "64"],
    "eval.report": ["nowhere"],
    "eval.study": ["rivals"],
}


@pytest.mark.parametrize("module", COMMANDS)
def test_out_is_a_file(module, tmp_path):
    out = tmp_path / "file"
    out.write_text("kept")
    done = subprocess.run(
        [sys.executable, "-m", module, *COMMANDS[module], "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"error: --out {out}: is a file; give a folder"
    assert out.read_text() == "kept"


def test_where_a_folder_cannot_be(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    check_output(tmp_path)
    check_output(tmp_path / "a" / "b")
    monkeypatch.chdir(tmp_path)
    check_output("a")
    for out, said in (
        (tmp_path / "file", "file: is a file"),
        ("file", "--out file: is a file"),
        (tmp_path / "file" / "a" / "b", f"b: {tmp_path / 'file'} is a file"),
        (tmp_path / "link" / "a", f"a: {tmp_path / 'link'} is a file"),
    ):
        with pytest.raises(UserError, match=said):
            check_output(out)
    # Root may write everywhere, so that the answer is given for it.
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != tmp_path)
    with pytest.raises(UserError, match=f"--out a/b: {tmp_path} may not be written to"):
        check_output("a/b")
