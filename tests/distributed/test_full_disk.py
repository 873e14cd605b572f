"""A disk that fills while two ranks train: both end with the file's name, checkpoints are whole."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import pytest

from cat_lm.core.errors import SharedError, UserError, is_temporary
from cat_lm.core.files import AppendedFile
from cat_lm.training.checkpoint import complete_checkpoints
from tests.distributed.ranks import run_on_ranks
from tests.distributed.test_resume import train
from tests.distributed.trainers import opened
from tests.runs import losses, records, run_values

FULL_AFTER = 7
NAMES = ("metrics.jsonl", "train.log", "events.out.tfevents.")


class FailingFile(io.FileIO):
    """A file that cannot be written to, for the reason of a number."""

    def __init__(self, path: Path, number: int) -> None:
        super().__init__(path, "a+")
        self.number = number

    def write(self, data: object) -> int:
        raise OSError(self.number, os.strerror(self.number))


def files(trainer) -> dict[str, AppendedFile]:
    """What the first rank appends to."""
    return {
        "metrics.jsonl": trainer.metrics._file,
        "train.log": trainer.log._file,
        "events.out.tfevents.": trainer.metrics._tensorboard._file,
    }


def values_of(data: str, folder: Path, **train_values: object) -> dict:
    values = run_values(data, folder, **train_values)
    values["logging"] = {"tensorboard": True}
    return values


def filled(ranks, data: str, folder: str) -> list[str]:
    """The messages of runs in which one file of the first rank does not grow any more."""
    from train import Trainer

    class Filled(Trainer):
        def train_step(self, batch, waited):
            super().train_step(batch, waited)
            if self.step == FULL_AFTER and ranks.is_first:
                file = files(self)[name]
                file._stream.close()
                file._stream = FailingFile(file._path, errno.ENOSPC)

    messages = []
    for name in NAMES:
        try:
            with opened(
                Filled, ranks, values_of(data, Path(folder) / name, log_every_steps=1)
            ) as trainer:
                trainer.run()
            messages.append("")
        except SharedError as error:
            messages.append(str(error))
    return messages


def continued_and_straight(ranks, data: str, folder: str) -> None:
    train(ranks, values_of(data, Path(folder) / NAMES[0], resume="auto"))
    train(ranks, values_of(data, Path(folder) / "straight"))


def test_a_full_disk_ends_all_ranks_and_the_run_goes_on_later(tiny_corpus, tmp_path):
    found = run_on_ranks(filled, 2, str(tiny_corpus), str(tmp_path))
    assert found[0] == found[1], "both ranks must end alike"
    for name, message in zip(NAMES, found[0], strict=True):
        assert f"/{name}" in message.split(": ")[0], message
        assert ": the disk is full; the run ends, its checkpoints are as they were" in message
        saved = complete_checkpoints(tmp_path / name / "checkpoints")
        assert [path.name for path in saved] == ["step-00000005"]
        assert records(tmp_path / name)[-1]["step"] == FULL_AFTER + 2 * (name != "metrics.jsonl"), (
            "the ranks learn on the next step's way that a record is lost"
        )
    run_on_ranks(continued_and_straight, 2, str(tiny_corpus), str(tmp_path))
    assert losses(tmp_path / NAMES[0]) == losses(tmp_path / "straight")


def broken(ranks, data: str, folder: str) -> list[tuple[bool, str]]:
    """(whether the end was a temporary error, its message) for the records and for the log."""
    from train import Trainer

    class Failing(Trainer):
        def train_step(self, batch, waited):
            super().train_step(batch, waited)
            if self.step == FULL_AFTER and ranks.is_first:
                file = files(self)[name]
                file._stream = FailingFile(file._path, errno.EIO)

    found = []
    for name in NAMES[:2]:
        values = values_of(data, Path(folder) / name, log_every_steps=1)
        try:
            with opened(Failing, ranks, values) as trainer:
                trainer.run()
        except SharedError as error:
            found.append((is_temporary(error), str(error)))
    return found


def test_a_file_system_that_fails_is_no_bad_input(tiny_corpus, tmp_path):
    """The job goes on by itself then; and a line for people costs no steps."""
    found = run_on_ranks(broken, 2, str(tiny_corpus), str(tmp_path))
    assert found[0] == found[1]
    (passes, of_records), (log_passes, of_log) = found[0]
    assert passes and "Input/output error; the run ends, its checkpoints are as they" in of_records
    assert log_passes and "Input/output error; the run ends, its checkpoints are whole" in of_log
    saved = [complete_checkpoints(tmp_path / name / "checkpoints")[-1].name for name in NAMES[:2]]
    assert saved == ["step-00000005", "step-00000009"]


def failing(ranks, errors: list[Exception | None]) -> tuple[bool, str]:
    def act() -> None:
        if error := errors[ranks.rank]:
            raise error

    try:
        ranks.on_all_ranks(act)
    except SharedError as error:
        return is_temporary(error), str(error)
    return False, ""


@pytest.mark.parametrize(
    ("errors", "found"),
    [
        ([None, OSError(errno.ESTALE, "stale", "a")], (True, "a: stale")),
        ([OSError(errno.ESTALE, "stale", "a"), UserError("b")], (False, "b")),
        ([None, ConnectionError("no answer")], (True, "ConnectionError: no answer")),
        ([None, ValueError("c")], (False, "ValueError: c")),
        ([None, None], (False, "")),
    ],
)
def test_ranks_agree_whether_an_error_may_pass(errors, found):
    assert run_on_ranks(failing, 2, errors) == [found, found]
