"""Tests of Triton kernels where there is no GPU: through Triton's interpreter, in another process.

Whether kernels are compiled or interpreted is settled for a process when they are imported, and
other tests of this process must see them as users do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY


def run_cases(files: tuple[str, ...], cache: Path, config: pytest.Config) -> None:
    """Run these files of tests/unit, which must pass without skips.

    Their tests that are marked `long` are run where `config` asks for them.
    """
    named = [f"tests/unit/{name}" for name in files]
    command = [sys.executable, "-m", "pytest", *named, "-q", "-p", "no:cacheprovider"]
    command += ["--all"] if config.getoption("--all") else []
    environment = os.environ | {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(cache)}
    result = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-20000:] + result.stderr[-5000:]
    assert " passed" in result.stdout and " skipped" not in result.stdout
