"""Files that a run appends to: whole pieces, and a disk that is full is noted, not raised."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cat_lm.core.errors import TemporaryError, UserError
from cat_lm.core.files import AppendedFile
from cat_lm.training.callbacks.tensorboard import Curves, EventFile
from cat_lm.training.metrics import Metrics, RunLog, read_records

FULL = Path("/dev/full")


@contextmanager
def file_sizes_limited(size: int) -> Iterator[None]:
    """Writes of this process that would make a file larger fail, in the middle of a piece."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def curves(folder: Path, say=lambda line: None) -> Curves:
    """The callback that writes TensorBoard's file, as a run launches it."""
    callback = Curves(SimpleNamespace(folder=folder, recorded_step=0, log=say))
    callback.launch(0)
    return callback


def test_piece_that_does_not_fit_leaves_nothing_behind(tmp_path):
    file = AppendedFile(tmp_path / "x")
    file.write(b"first\n")
    with file_sizes_limited(10):
        file.write(b"second\n")
    assert str(file.error) == f"{tmp_path / 'x'}: File too large"
    assert not isinstance(file.error, TemporaryError)
    file.write(b"third\n")  # not after a gap
    file.sync()
    file.close()
    assert (tmp_path / "x").read_bytes() == b"first\n"


class Failing(io.FileIO):
    """A file of NFS, which may say only when it is flushed or closed that there was no room."""

    def close(self) -> None:
        was_closed = self.closed
        super().close()
        if not was_closed:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    def write(self, data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_flush_and_close_that_fail_are_noted(tmp_path, monkeypatch):
    file, other = AppendedFile(tmp_path / "x"), AppendedFile(tmp_path / "y")
    file._stream = Failing(file._path, "a+")
    file.close()
    assert str(file.error) == f"{tmp_path / 'x'}: Disk quota exceeded"

    def fail(handle: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    other.sync()
    assert str(other.error) == f"{tmp_path / 'y'}: Input/output error"
    assert isinstance(other.error, TemporaryError)


def test_replaced_file_is_appended_to_and_a_link_is_an_error(tmp_path):
    said = []
    file = AppendedFile(tmp_path / "x", said.append)
    file.write(b"1\n")
    (tmp_path / "x").unlink()
    (tmp_path / "x").write_bytes(b"edited\n")
    file.write(b"2\n")
    assert (tmp_path / "x").read_bytes() == b"edited\n2\n" and "was replaced" in said[0]
    (tmp_path / "x").unlink()
    (tmp_path / "x").symlink_to("theirs")
    file.write(b"3\n")
    file.close()
    assert "is a link" in str(file.error) and not (tmp_path / "theirs").exists()


def test_files_removed_under_way_are_written_again_whole(tmp_path, capsys):
    log = RunLog(tmp_path / "train.log")
    recorded, drawn = Metrics(tmp_path, 0, log.line), curves(tmp_path, log.line)
    log.line("a line")
    for step in (1, 2, 3):
        recorded.write({"step": step, "loss": 1.5})
        drawn.record({"step": step, "loss": 1.5})
        shutil.rmtree(tmp_path)
    recorded.close()
    drawn.end(3, 0)
    log.close()
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in found.Scalars("train/loss")] == [1, 2, 3]
    lines = (tmp_path / "train.log").read_text().splitlines()
    assert " a line" in lines[0]
    for name in ("metrics.jsonl", "train.log", "tfevents"):
        assert any(name in line and "was removed or renamed" in line for line in lines)


def test_event_file_is_what_tensorboard_reads(tmp_path):
    events = EventFile(tmp_path, purge_step=1)
    for step in (1, 2, 3):
        events.add(step, {"train/loss": 1.5 * step, "validation/val_loss": 2.0})
    events.close()
    resumed = EventFile(tmp_path, purge_step=3)  # step 3 is done again
    resumed.add(3, {"train/loss": 7.0})
    resumed.close()
    assert len(list(tmp_path.iterdir())) == 2
    found = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload()
    assert set(found.Tags()["scalars"]) == {"train/loss", "validation/val_loss"}
    losses = [(event.step, event.value) for event in found.Scalars("train/loss")]
    assert losses == [(1, 1.5), (2, 3.0), (3, 7.0)]


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_full_disk_is_noted_and_said_by_nobody(tmp_path, capfd):
    """Neither by TensorBoard's part nor by a thread; the terminal still has the lines."""
    log = RunLog(FULL)
    for text in ("a line", "another"):
        log.line(text)
    assert str(log.error) == "/dev/full: the disk is full"
    log.close()
    for name in ("metrics.jsonl", "events.out.tfevents."):
        threads = threading.active_count()
        recorded, drawn = Metrics(tmp_path, recorded_step=0), curves(tmp_path)
        written, file = next(
            (owner, file)
            for owner, file in ((recorded, recorded._file), (drawn.events, drawn.events._file))
            if file._path.name.startswith(name)
        )
        file._stream = Failing(file._path, "a+")
        for step in range(1, 50):
            recorded.write({"step": step, "loss": 2.0})
            with contextlib.suppress(UserError):
                drawn.record({"step": step, "loss": 2.0})
        recorded.sync()
        recorded.close()
        assert name in str(written.error) and str(written.error).endswith(": the disk is full")
        assert threading.active_count() == threads
    printed = capfd.readouterr()
    assert printed.out.splitlines() == ["a line", "another"] and printed.err == ""
