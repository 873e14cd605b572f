"""What a measuring process of `eval.speed` is given in a test, in a module that loads quickly."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path


def environment(options: argparse.Namespace) -> dict[str, str | None]:
    """Give the policy that this process has."""
    names = ("OMP_WAIT_POLICY", "OMP_PROC_BIND", "OMP_NUM_THREADS")
    return {name: os.environ.get(name) for name in names} | {"kept": options.kept}


def die(options: argparse.Namespace) -> None:
    """End as a process does that the system kills."""
    os._exit(9)


def hang(options: argparse.Namespace) -> None:
    """Say who this is, into the pipe `options.kept`, measure for long, and say that it is done."""
    Path(options.kept).write_text(str(os.getpid()))
    time.sleep(60)
    Path(options.done).touch()
