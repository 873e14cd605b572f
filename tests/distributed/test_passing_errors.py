"""A file system that fails for a while at a checkpoint: code 75, not the end of a SLURM job."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

from safetensors import SafetensorError

from cat_lm.core import readers
from cat_lm.core.errors import SharedError, UserError, is_temporary
from cat_lm.training.checkpoint import complete_checkpoints
from tests.checkpoints import flip, seal
from tests.distributed.ranks import run_on_ranks
from tests.distributed.trainers import train
from tests.runs import run_values

STATES = "cat_lm.training.checkpoint.optimizer_state"
FIRST_RANKS = ("cat_lm.training.checkpoint.run.save_file", "shutil.copytree")


def serializing(number: int) -> SafetensorError:
    return SafetensorError(f"I/O error: {os.strerror(number)} (os error {number})")


def copying(number: int) -> shutil.Error:
    return shutil.Error([("a", "b", f"[Errno {number}] {os.strerror(number)}: 'a'")])


def storing(number: int) -> OSError:
    return OSError(number, os.strerror(number))


# What fails in a save, the error that it raises of a number, and the number.
WRITERS = (
    (f"{STATES}.save_file", serializing, errno.ESTALE),
    ("cat_lm.training.checkpoint.run.save_file", serializing, errno.ENOSPC),
    ("shutil.copytree", copying, errno.EIO),
    ("pathlib.Path.write_bytes", storing, errno.ENOSPC),
    ("os.fsync", storing, errno.EIO),
)


def outcome(ranks, values: dict[str, Any], failing=None) -> tuple[bool, str]:
    """Return whether the same command may go on, and the line that a run ends with."""
    try:
        with failing or contextlib.nullcontext():
            train(ranks, values)
    except UserError as error:
        return is_temporary(error), str(error)
    return False, "finished"


def written(ranks, data: str, folder: str) -> list[tuple[bool, str]]:
    """What runs end with in whose second save the last rank alone cannot write, or the first."""
    found = []
    for number, (writer, error, code) in enumerate(WRITERS):
        values = run_values(data, Path(folder) / str(number), max_steps=1)
        assert outcome(ranks, values) == (False, "finished")
        values["train"] |= {"max_steps": 2, "resume": "auto"}
        fails = ranks.is_first == (writer in FIRST_RANKS)
        found.append(
            outcome(ranks, values, mock.patch(writer, side_effect=error(code)) if fails else None)
        )
    return found


def test_checkpoint_that_cannot_be_written_ends_all_ranks_alike(tiny_corpus, tmp_path):
    first, second = run_on_ranks(written, 2, str(tiny_corpus), str(tmp_path))
    assert first == second
    for number, (passes, line) in enumerate(first):
        writer, _, code = WRITERS[number]
        assert passes == (code != errno.ENOSPC), (writer, line)
        said = "the disk is full" if code == errno.ENOSPC else os.strerror(code)
        assert "step-00000002: the checkpoint could not be written (" in line and said in line
        assert "newest complete one: step-00000001" in line and "\n" not in line
        left = complete_checkpoints(tmp_path / f"{number}/checkpoints")
        assert [path.name for path in left] == ["step-00000001"]


def unreadable(error: Exception):
    return mock.patch(f"{STATES}.safe_open", side_effect=error)


def stale_states():
    """Fail to open the generators' states, which Python reads."""

    def opening(path: Path, mode: str):
        if path.suffix == ".pt":
            raise storing(errno.ESTALE)
        return open(path, mode)

    return mock.patch.object(readers, "open", opening, create=True)


def cut(path: Path, step: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])
    seal(step)


def read(ranks, data: str, folder: str) -> dict[str, tuple[bool, str]]:
    """What runs say that go on from a checkpoint whose files fail to be read, or are damaged."""
    first = Path(folder) / "first"
    outcome(ranks, run_values(data, first, max_steps=1))
    mapped = RuntimeError("unable to open file <a> in read-only mode: Stale file handle (116)")
    state, generators = "state/rank-00000.safetensors", "random-00000.pt"
    cases = {
        "not opened": (unreadable(FileNotFoundError("No such file or directory: a")), None, ""),
        "stale": (unreadable(serializing(errno.ESTALE)), None, ""),
        "not mapped": (unreadable(mapped), None, ""),
        "states stale": (stale_states(), None, ""),
        "cut": (None, cut, state),
        "flipped": (None, lambda path, step: flip(path), state),
        "states cut": (None, cut, generators),
    }
    found = {}
    for name, (failing, damage, file) in cases.items():
        run = Path(folder) / name
        shutil.copytree(first, run)
        if damage:
            step = run / "checkpoints/step-00000001"
            damage(step / file, step)
        found[name] = outcome(ranks, run_values(data, run, max_steps=2, resume="auto"), failing)
    return found


def test_checkpoint_that_cannot_be_read_now_is_no_damage(tiny_corpus, tmp_path):
    (found,) = run_on_ranks(read, 1, str(tiny_corpus), str(tmp_path))
    for name in ("not opened", "stale", "not mapped", "states stale"):
        assert found[name][0], (name, found[name])
    for name, said in {
        "cut": "rank-00000.safetensors: is damaged",
        "flipped": "its checksum differs",
        "states cut": "random-00000.pt: cannot be read as states",
    }.items():
        passes, line = found[name]
        assert said in line and not passes, (name, line)


# Of two ranks the errors, and what all raise.
AGREED = (
    ([None, OSError(errno.ESTALE, "stale", "a")], (True, "a: stale")),
    ([OSError(errno.ESTALE, "stale", "a"), UserError("b")], (False, "b")),
    ([None, ConnectionError("no answer")], (True, "ConnectionError: no answer")),
    ([None, ValueError("c")], (False, "ValueError: c")),
    ([None, None], (False, "")),
)


def failing(ranks, on_first_only: bool) -> list[tuple[bool, str]]:
    def act(error: Exception | None) -> None:
        if error:
            raise error

    found = []
    for errors, _ in AGREED:
        call = ranks.on_rank_zero if on_first_only else ranks.on_all_ranks
        try:
            call(lambda errors=errors: act(errors[ranks.rank]))
            found.append((False, ""))
        except SharedError as error:
            found.append((is_temporary(error), str(error)))
    return found


def test_ranks_agree_whether_an_error_may_pass():
    assert run_on_ranks(failing, 2, False) == [[found for _, found in AGREED]] * 2
    first, second = run_on_ranks(failing, 2, True)
    assert first == second and first[1] == (True, "a: stale"), "no rank goes on without the first"
