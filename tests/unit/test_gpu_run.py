"""tests/gpu/run.sh --short: its dry run, its cache, and that a line that fails stops no other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cat_lm.ops.runtime.triton_launch import INSTALLED
from tests.conftest import REPOSITORY

RUN = REPOSITORY / "tests/gpu/run.sh"
LINES = ["versions", "ceilings", "tests", "train", "step", "conv"]
LINES += ["sizes", "decode", "hazard", "compiled", "rows"]


def run(python: str | Path, *words: object) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHON": str(python)}
    command = ["bash", str(RUN), *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.skipif(not INSTALLED, reason="triton is not installed")
def test_the_dry_run_checks_the_lines_and_counts_the_kernels(tmp_path):
    done = run(sys.executable, "--short", tmp_path / "out", "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"(?m)^ \d:\d\d +\d+ s  (\w+)", done.stdout) == LINES
    (kernels,) = re.findall(r"(\d+) kernels have keys", done.stdout)
    assert int(kernels) >= 50
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not INSTALLED, reason="triton is not installed")
def test_a_cache_that_was_moved_is_found_after_it_is_relocated(tmp_path):
    """Triton writes whole paths into it."""
    code = """
import os, sys
from functools import partial
from pathlib import Path
from tests.gpu import kernels
kernels.chosen_tests = lambda: []
kernels._run_tests = lambda *_: None
kernels._models = lambda: [partial(kernels._convolve, "depthwise", 4)]
made, moved = map(Path, sys.argv[1:])
os.environ["TRITON_CACHE_DIR"] = str(made)
print(kernels.find(compile_them=True))
made.rename(moved)
os.environ["TRITON_CACHE_DIR"] = str(moved)
def look():
    import cat_lm.ops.convolution.triton.forward as f, cat_lm.ops.convolution.triton.backward as b
    f.forward_kernel.device_caches.clear(), b.backward_kernel.device_caches.clear()
    print(kernels.find(compile_them=False))
look()
kernels.relocate(moved)
look()
"""
    command = [sys.executable, "-c", code, tmp_path / "made", tmp_path / "moved"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"(\d) of 2 kernels are in the cache", done.stdout)
    assert found == ["0", "0", "2"]


def test_a_line_that_fails_stops_no_other(tmp_path):
    """With an interpreter of a test in the place of Python's."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/bash\n[ "$1" = -c ] && exit 0\n'
        '[ "$3" = train ] && { echo "error: no memory"; exit 3; }\n'
        'echo "$3 ran"\n'
    )
    python.chmod(0o755)
    done = run(python, "--short", tmp_path / "out")
    assert done.returncode == 1
    told = done.stdout.splitlines()
    assert [line.split(":")[0] for line in told[:-1]] == LINES and told[-1] == "table ran"
    assert told[3].startswith("train: failed with 3: error: no memory, ")
    log = (tmp_path / "out/short.log").read_text()
    assert all(f"{name} ran" in log for name in LINES if name != "train")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), "give --short OUT or --make-cache DIR"),
        (("out",), "out: is no option"),
        (("--short",), "--short: needs a folder"),
        (("--short", "out", "--cache", "/nowhere"), "/nowhere: no such folder"),
    ],
)
def test_wrong_options_are_one_line(words, named):
    done = run(sys.executable, *words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and named in done.stderr
