"""A file system that fails for a while at a checkpoint: code 75, not the end of a SLURM job."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path
from typing import IO, Any
from unittest import mock

from safetensors import SafetensorError

from cat_lm.core import readers
from cat_lm.core.errors import UserError, is_temporary
from tests.checkpoints import flip, seal
from tests.distributed.ranks import run_on_ranks
from tests.distributed.trainers import opened
from tests.runs import run_values

STATES = "cat_lm.training.checkpoint.optimizer_state"
FINISHED = (False, "finished")


def serializing(number: int) -> SafetensorError:
    return SafetensorError(f"I/O error: {os.strerror(number)} (os error {number})")


def copying(number: int) -> shutil.Error:
    return shutil.Error([("a", "b", f"[Errno {number}] {os.strerror(number)}: 'a'")])


def storing(number: int) -> OSError:
    return OSError(number, os.strerror(number))


# What writes, and the error that it raises of a number.
WRITERS = {
    f"{STATES}.save_file": serializing,
    "cat_lm.training.checkpoint.run.save_file": serializing,
    "shutil.copytree": copying,
    "pathlib.Path.write_bytes": storing,
}


def outcome(ranks, values: dict[str, Any], failing=None) -> tuple[bool, str]:
    """Whether the same command may go on, and what the run says at its end."""
    from train import Trainer

    try:
        with failing or contextlib.nullcontext(), opened(Trainer, ranks, values) as trainer:
            trainer.run()
    except UserError as error:
        return is_temporary(error), str(error)
    return FINISHED


def written(ranks, data: str, folder: str) -> dict[tuple[str, int], tuple[bool, str]]:
    """What runs end with in whose save the last rank alone cannot write, or the first."""
    found = {}
    for writer, error in WRITERS.items():
        for number in (errno.ESTALE, errno.EIO, errno.ENOSPC):
            values = run_values(data, Path(folder) / f"{writer}-{number}", max_steps=1)
            is_first_s = writer in ("cat_lm.training.checkpoint.run.save_file", "shutil.copytree")
            fails = ranks.is_first == is_first_s
            failing = mock.patch(writer, side_effect=error(number)) if fails else None
            found[writer, number] = outcome(ranks, values, failing)
    return found


def test_a_checkpoint_that_cannot_be_written_for_a_while(tiny_corpus, tmp_path):
    first, second = run_on_ranks(written, 2, str(tiny_corpus), str(tmp_path))
    assert first == second and len(first) == 12
    for (writer, number), (passes, line) in first.items():
        assert passes == (number != errno.ENOSPC), (writer, line)
        said = "the disk is full" if number == errno.ENOSPC else os.strerror(number)
        assert "step-00000001: the checkpoint could not be written (" in line and said in line
        assert len(line.splitlines()) == 1


def unreadable(error: Exception):
    """Fail to open safetensors files."""
    return mock.patch(f"{STATES}.safe_open", side_effect=error)


def stale_states():
    """The same of the generators' states, which Python reads."""

    def opening(path: Path, mode: str) -> IO:
        if path.suffix == ".pt":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return open(path, mode)

    return mock.patch.object(readers, "open", opening, create=True)


def read(ranks, data: str, folder: str) -> dict[str, tuple[bool, str]]:
    """What runs say that go on from a checkpoint whose files fail to be read, or are damaged."""
    first = Path(folder) / "first"
    assert outcome(ranks, run_values(data, first, max_steps=1)) == FINISHED
    mapped = RuntimeError("unable to open file <a> in read-only mode: Stale file handle (116)")
    absent = FileNotFoundError("No such file or directory: a")
    cases = {
        "not opened": unreadable(absent),
        "stale": unreadable(serializing(errno.ESTALE)),
        "not mapped": unreadable(mapped),
        "states stale": stale_states(),
    }
    found = {}
    for name, failing in cases.items():
        run = Path(folder) / name
        shutil.copytree(first, run)
        found[name] = outcome(ranks, run_values(data, run, max_steps=2, resume="auto"), failing)
    for name in ("cut and sealed", "flipped", "states cut and sealed"):
        run = Path(folder) / name
        shutil.copytree(first, run)
        step = run / "checkpoints/step-00000001"
        file = step / ("random-00000.pt" if "states" in name else "state/rank-00000.safetensors")
        if "cut" in name:
            file.write_bytes(file.read_bytes()[:-4])
            seal(step)
        else:
            flip(file)
        found[name] = outcome(ranks, run_values(data, run, max_steps=2, resume="auto"))
    return found


def test_a_checkpoint_that_cannot_be_read_for_a_while(tiny_corpus, tmp_path):
    (found,) = run_on_ranks(read, 1, str(tiny_corpus), str(tmp_path))
    for name in ("not opened", "stale", "not mapped", "states stale"):
        assert found[name][0], (name, found[name])
    for name, said in {
        "cut and sealed": "rank-00000.safetensors: is damaged",
        "flipped": "its checksum differs",
        "states cut and sealed": "random-00000.pt: cannot be read as states",
    }.items():
        passes, line = found[name]
        assert said in line and not passes, (name, line)
