"""train.py on a small file system that fills while it trains; when there is room, it goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cat_lm.training.checkpoint import is_complete
from tests.conftest import REPOSITORY
from tests.distributed.ranks import run_on_ranks
from tests.distributed.trainers import train
from tests.runs import losses, run_values, write_config

# Fills the file system after a step, from inside of the run: at no other moment.
PROGRAM = """
import os, sys, train
real = train.Trainer.train_step
def train_step(self, batch, waited):
    real(self, batch, waited)
    if self.step == int(os.environ["FULL_AFTER"]):
        size = 1 << 20
        with open(os.environ["FILLER"], "wb", buffering=0) as file:
            while size:
                try:
                    file.write(b"0" * size)
                except OSError:
                    size //= 2
train.Trainer.train_step = train_step
train.main()
"""


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a file system of its own: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def values(data: Path, run: Path, every: int, steps: int) -> dict:
    result = run_values(data, run, max_steps=steps, resume="auto")
    result["validation"] = {"every_steps": steps, "max_tokens": 512}
    result["checkpoint"] = {"every_steps": every, "keep_last": 2}
    result["logging"] = {"tensorboard": True}
    return result


# Of two ranks, tests/distributed/test_full_disk.py does it in the short tier.
@pytest.mark.parametrize(
    ("every", "full_after", "steps", "reason"),
    [
        pytest.param(
            *(5, 7, 12, "step-00000010: the checkpoint could not be written"),
            marks=pytest.mark.long,
        ),
        # So far from a checkpoint that records need more room than the disk's last block has.
        pytest.param(
            *(30, 31, 60, ": the disk is full; the run ends, its checkpoints are as they were"),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_run_that_fills_its_disk_goes_on_when_there_is_room(
    every, full_after, steps, reason, small_disk, tiny_corpus, tmp_path
):
    """Whether a checkpoint or a record is the first to find no room."""
    run, filler = small_disk / "run", small_disk / "filler"
    config = write_config(tmp_path, values(tiny_corpus, run, every, steps))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, config],
        cwd=REPOSITORY,
        env={**os.environ, "FULL_AFTER": str(full_after), "FILLER": str(filler)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2, done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"error: {run}/") and reason in line
    saved = sorted(path for path in (run / "checkpoints").iterdir() if path.name != ".lock")
    assert [path.name for path in saved] == ["latest", f"step-{every:08d}"]
    assert is_complete(saved[-1])

    filler.unlink()
    for folder in (run, tmp_path / "straight"):
        run_on_ranks(train, 1, values(tiny_corpus, folder, every, steps))
    assert losses(run) == losses(tmp_path / "straight")
