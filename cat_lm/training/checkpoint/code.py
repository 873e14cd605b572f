"""The version of the code that wrote a checkpoint."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cat_lm import __version__, plugins
from cat_lm.io.readers import Record


class CopiedCode(Record):
    """code.json, which `launch.slurm` puts beside a copy of the code."""

    commit: str
    dirty: bool


def code_version() -> dict[str, Any]:
    """Return cat_lm's version, its git commit (`+`: with changes) if known, and the plugins."""
    checkout = Path(__file__).resolve().parents[3]
    commit = copied_commit(checkout) or _git_commit(checkout)
    return {"cat_lm": __version__, "commit": commit, "plugins": plugins.describe()}


def copied_commit(checkout: Path) -> str | None:
    """Return the commit, `+` with changes, of which `checkout` is a copy; None where it is none."""
    try:
        record = CopiedCode.model_validate_json((checkout.parent / "code.json").read_bytes())
    except (OSError, ValidationError):
        return None
    return record.commit + ("+" if record.dirty else "")


def _git_commit(checkout: Path) -> str | None:
    try:
        found = subprocess.run(
            ["git", "-C", str(checkout), "describe", "--always", "--dirty=+", "--abbrev=40"],
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found or None
