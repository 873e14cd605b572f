"""A disk that fills while two ranks train: both end with the file's name, checkpoints are whole."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

from cat_lm.core.errors import SharedError, is_temporary
from cat_lm.training.checkpoint import complete_checkpoints
from tests.distributed.ranks import run_on_ranks
from tests.distributed.trainers import after, train
from tests.runs import losses, records, run_values

FAILS_AFTER = 7
# The file of the first rank that cannot grow any more, and why.
CASES = (
    ("metrics.jsonl", errno.ENOSPC),
    ("train.log", errno.ENOSPC),
    ("events.out.tfevents.", errno.ENOSPC),
    ("metrics.jsonl", errno.EIO),
    ("train.log", errno.EIO),
)


class FailingFile(io.FileIO):
    """A file that cannot be written to, for the reason of a number."""

    def __init__(self, path: Path, number: int) -> None:
        super().__init__(path, "a+")
        self.number = number

    def write(self, data: object) -> int:
        raise OSError(self.number, os.strerror(self.number))


def values_of(data: str, folder: Path, **train_values: object) -> dict:
    values = run_values(data, folder, **train_values)
    values["logging"] = {"tensorboard": True}
    return values


def failing_runs(ranks, data: str, folder: str) -> list[tuple[bool, str]]:
    """Whether the end was a temporary error, and its message."""
    found = []
    for name, number in CASES:

        def prepare(trainer, name=name, number=number):
            def fail():
                if trainer.step == FAILS_AFTER and ranks.is_first:
                    metrics = trainer.metrics
                    curves = trainer.callbacks._callbacks["tensorboard"]
                    files = (metrics._file, trainer.log._file, curves.events._file)
                    file = next(f for f in files if f._path.name.startswith(name))
                    file._stream = FailingFile(file._path, number)

            after(trainer, "train_step", fail)

        values = values_of(data, Path(folder) / f"{name}-{number}", log_every_steps=1)
        try:
            train(ranks, values, prepare=prepare)
        except SharedError as error:
            found.append((is_temporary(error), str(error)))
    return found


def continued_and_straight(ranks, data: str, folder: str) -> None:
    train(ranks, values_of(data, Path(folder) / f"metrics.jsonl-{errno.ENOSPC}", resume="auto"))
    train(ranks, values_of(data, Path(folder) / "straight"))


def test_file_that_cannot_grow_ends_all_ranks_and_the_run_resumes(tiny_corpus, tmp_path):
    first, second = run_on_ranks(failing_runs, 2, str(tiny_corpus), str(tmp_path))
    assert first == second, "both ranks must end alike"
    for (name, number), (passes, message) in zip(CASES, first, strict=True):
        run = tmp_path / f"{name}-{number}"
        is_line = (name, number) == ("train.log", errno.EIO)  # which costs no steps
        why = "the disk is full" if number == errno.ENOSPC else "Input/output error"
        # Neither lines for people nor curves are a reason not to save.
        saves = is_line or "tfevents" in name
        left = f"the run ends, its checkpoints are {'whole' if is_line else 'as they were'}"
        left = "newest complete one: step-00000009" if "tfevents" in name else left
        assert f"/{name}" in message and passes == (number == errno.EIO)
        assert f": {why}; {left}" in message
        saved = complete_checkpoints(run / "checkpoints")[-1].name
        assert saved == ("step-00000009" if saves else "step-00000005")
        # The ranks learn on the next step's way that a record is lost.
        assert records(run)[-1]["step"] == FAILS_AFTER + 2 * (name != "metrics.jsonl")
    run_on_ranks(continued_and_straight, 2, str(tiny_corpus), str(tmp_path))
    assert losses(tmp_path / f"metrics.jsonl-{errno.ENOSPC}") == losses(tmp_path / "straight")
