"""A folder to write to that is a file ends a command before it works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {
    "eval.recall": ["theory"],
    "eval.length_sweep": ["nowhere", "--text", "nowhere", "--lengths", "64"],
    "eval.report": ["nowhere"],
    "eval.small_study": ["--estimate"],
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
