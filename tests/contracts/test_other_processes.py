"""The contracts once more where kernels are of another kind, which is settled for a process.

In Triton's interpreter (TRITON_INTERPRET=1), and without a C++ compiler. No file that is named here
may be this one.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY
from tests.contracts.operators import INSTALLED

# What the interpreter, which is slow and does one thing at a time, runs of which files.
INTERPRETED_FILES = {
    "test_kinds.py": "triton and not (same_bits or some_inputs or filters or second or "
    "long_window)",
    "test_recurrences.py test_long_filters.py": "triton and not (bits or half or traced or vmap "
    "or nothing or leave or fit or serves or none_to_total)",
    "test_landmark_ops.py test_losses.py test_packed_convolution.py": "triton",
    "triton_only.py test_kernels.py::test_operators_keep_the_rules_of_torch": "test",
}


def run_contracts(files: str, keyword: str, *options: str, **environment: str) -> None:
    """Run the chosen tests of files of contracts in a process, where all must pass."""
    named = [f"tests/contracts/{name}" for name in files.split()]
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            *named,
            "-k",
            keyword,
            "-q",
            "-p",
            "no:cacheprovider",
            *options,
        ],
        cwd=REPOSITORY,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-20000:] + result.stderr[-5000:]
    assert " passed" in result.stdout and " skipped" not in result.stdout


@pytest.mark.skipif(not INSTALLED, reason="triton is not installed")
@pytest.mark.parametrize("files", INTERPRETED_FILES)
def test_contracts_hold_in_interpreter(files, tmp_path, pytestconfig):
    own = {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    options = ["--nightly"] if pytestconfig.getoption("--nightly") else []
    run_contracts(files, INTERPRETED_FILES[files], *options, **own)


def test_contracts_hold_without_compiler(tmp_path):
    own = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    run_contracts("test_kinds.py test_packed_convolution.py", "cpu", **own)
