"""RUN/slurm/attempts.log: a line for every start of a run; how a crash loop is recognised.

The batch script keeps the same file in bash, since where it runs there may be no Python.
"""

from __future__ import annotations

from datetime import UTC, datetime

from cat_lm.training.checkpoint import MARKER, step_folders
from launch.slurm.folder import RunFolder


def newest_checkpoint(folder: RunFolder) -> str:
    """The name of the newest marked checkpoint, or `none`."""
    marked = [step for step in step_folders(folder.checkpoints) if (step / MARKER).is_file()]
    return marked[-1].name if marked else "none"


def count_anew(folder: RunFolder, why: str) -> None:
    """A person looked at the run: earlier attempts count no more."""
    _append(folder, f"# {_now()} {why}")


def begin(folder: RunFolder, job: str, restart: int) -> None:
    _append(folder, f"{_now()} job={job} restart={restart} checkpoint={newest_checkpoint(folder)}")


def lines(folder: RunFolder) -> list[str]:
    """All attempts, oldest first."""
    return [line for line in _lines(folder) if not line.startswith("#")]


def without_progress(folder: RunFolder) -> int:
    """Count the last attempts in a row that began at the checkpoint that is still newest."""
    count, now = 0, newest_checkpoint(folder)
    for line in reversed(_lines(folder)):
        if not line.endswith(f" checkpoint={now}"):
            break
        count += 1
    return count


def _lines(folder: RunFolder) -> list[str]:
    try:
        return folder.attempts.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []


def _append(folder: RunFolder, line: str) -> None:
    with open(folder.attempts, "a", encoding="utf-8") as stream:
        stream.write(line + "\n")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
