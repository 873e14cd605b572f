"""What a measuring process of `eval.speed` is given in a test, in a module that loads quickly."""

from __future__ import annotations

import argparse
import os


def environment(options: argparse.Namespace) -> dict[str, str | None]:
    """Give the policy that this process has."""
    names = ("OMP_WAIT_POLICY", "OMP_PROC_BIND", "OMP_NUM_THREADS")
    return {name: os.environ.get(name) for name in names} | {"kept": options.kept}


def die(options: argparse.Namespace) -> None:
    """End as a process does that the system kills."""
    os._exit(9)
