"""The commit of the code that runs, for checkpoints and results."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from pydantic import ValidationError

from cat_lm.core.readers import Versioned

_OF_A_REPOSITORY = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")


class CopiedCode(Versioned):
    """code.json, which `launch.slurm` puts beside a copy of the code."""

    commit: str | None
    dirty: bool | None


def commit() -> str | None:
    """Return the commit of this code, `+` behind it where tracked files differ; None if unknown.

    A copy by `launch.slurm` has that of what was copied: the checkout that its run lies in may have
    gone on since. Of a repository that the code lies in without being tracked by it, such as one
    with a virtual environment, there is none.
    """
    checkout = Path(__file__).resolve().parents[2]
    try:
        record = CopiedCode.model_validate_json((checkout.parent / "code.json").read_bytes())
    except (OSError, ValidationError):
        return _git_commit(checkout)
    return record.commit and record.commit + ("+" if record.dirty else "")


def _git_commit(checkout: Path) -> str | None:
    # A hook of another repository hands on where that one is.
    here = {k: v for k, v in os.environ.items() if k not in _OF_A_REPOSITORY}

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        told = {"capture_output": True, "text": True, "env": here}
        return subprocess.run(command, check=True, timeout=60, **told).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", __file__)
        changed = git("status", "--porcelain", "--untracked-files=no", ".")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
