"""Files that a run appends to: whole pieces, and a disk that is full is noted, not raised."""

from __future__ import annotations

import errno
import gc
import io
import os
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cat_lm.config import RunConfig
from cat_lm.core.errors import TemporaryError, UserError
from cat_lm.core.files import AppendedFile, write_json
from cat_lm.training import metrics
from cat_lm.training.distributed import describe_error
from cat_lm.training.metrics import EventFile, Metrics, RunLog, read_records
from tests.runs import run_values

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


def test_what_does_not_fit_leaves_nothing_behind(tmp_path):
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


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "theirs").write_text("their words\n")
    (tmp_path / "x").symlink_to("theirs")
    with pytest.raises(UserError, match="x: is a link, must be a run's own file"):
        AppendedFile(tmp_path / "x")
    assert (tmp_path / "theirs").read_text() == "their words\n"


def test_a_flush_that_fails_is_noted(tmp_path, monkeypatch):
    file = AppendedFile(tmp_path / "x")
    file.write(b"1")

    def fail(handle: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    file.sync()
    assert str(file.error) == f"{tmp_path / 'x'}: Input/output error"
    assert isinstance(file.error, TemporaryError)


class ClosedBadly(io.FileIO):
    """A file of NFS, which may say only when it is closed that there was no room."""

    def close(self) -> None:
        was_closed = self.closed
        super().close()
        if not was_closed:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def test_a_close_that_fails_is_noted(tmp_path):
    file, other = AppendedFile(tmp_path / "x"), AppendedFile(tmp_path / "y")
    for each in (file, other):
        each._stream = ClosedBadly(each._path, "a+")
    file.close()
    assert str(file.error) == f"{tmp_path / 'x'}: Disk quota exceeded"
    with file_sizes_limited(0):
        other.write(b"1")
    other.close()
    assert str(other.error) == f"{tmp_path / 'y'}: File too large"


def test_removed_file_is_written_again_whole(tmp_path):
    said = []
    file = AppendedFile(tmp_path / "x", said.append)
    for text in (b"1\n", b"2\n", b"3\n"):
        file.write(text)
        (tmp_path / "x").unlink()
    file.sync()  # nothing is written after the last removal but by this
    assert (tmp_path / "x").read_bytes() == b"1\n2\n3\n"
    (tmp_path / "x").unlink()
    file.close()
    assert (tmp_path / "x").read_bytes() == b"1\n2\n3\n" and file.error is None
    how = "was removed or renamed; it is written again with all that it held"
    expected = f"{tmp_path / 'x'}: {how}"
    assert said == [expected] * 4


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


def test_records_and_logs_removed_under_way_are_whole_and_said(tmp_path, capsys):
    values = run_values("unused", "unused")
    values["logging"] = {"tensorboard": True}
    log = RunLog(tmp_path / "train.log")
    recorded = Metrics(tmp_path, RunConfig.model_validate(values), 0, log.line)
    log.line("a line")
    for step in (1, 2, 3):
        recorded.write({"step": step, "loss": 1.5})
        shutil.rmtree(tmp_path)
    recorded.close()
    log.close()
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in found.Scalars("train/loss")] == [1, 2, 3]
    lines = (tmp_path / "train.log").read_text().splitlines()
    assert " a line" in lines[0]
    for name in ("metrics.jsonl", "train.log", "tfevents"):
        assert any(name in line and "was removed or renamed" in line for line in lines)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_log_on_a_full_disk(capsys):
    log = RunLog(FULL)
    log.line("a line")
    assert str(log.error) == "/dev/full: the disk is full"
    log.line("another")
    log.close()
    del log
    gc.collect()
    printed = capsys.readouterr()
    assert printed.out.splitlines() == ["a line", "another"] and printed.err == ""


def test_an_event_file_is_what_tensorboard_reads(tmp_path):
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


class FullFile(io.FileIO):
    """A file on a disk that is full."""

    def write(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_metrics_on_a_full_disk(tmp_path, capfd):
    """Also TensorBoard's part: it is noted, nothing waits, and no thread says a word."""
    values = run_values("unused", "unused")
    values["logging"] = {"tensorboard": True}
    for name in ("_file", "_tensorboard"):
        threads = threading.active_count()
        recorded = Metrics(tmp_path, RunConfig.model_validate(values), recorded_step=0)
        part = getattr(recorded, name)
        file = part if name == "_file" else part._file
        file._stream.close()
        file._stream = FullFile(file._path, "a+")
        for step in range(1, 50):
            recorded.write({"step": step, "loss": 2.0})
        recorded.sync()
        recorded.close()
        where = "metrics.jsonl" if name == "_file" else "events.out.tfevents."
        assert where in str(recorded.error) and str(recorded.error).endswith(": the disk is full")
        assert threading.active_count() == threads
    assert capfd.readouterr().err == ""


def test_a_file_that_is_replaced_is_named(tmp_path, monkeypatch):
    """Such as config.yaml and the id of Weights & Biases; nothing of the new one is left."""

    def fail(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setitem(__import__("sys").modules, "wandb", object())
    values = run_values("unused", "unused")
    values["logging"] = {"wandb_project": "p", "tensorboard": False}
    config = RunConfig.model_validate(values)
    for name, write in (
        ("state.json", lambda: write_json(tmp_path / "state.json", {})),
        ("config.yaml", lambda: config.save(tmp_path / "config.yaml")),
        ("wandb_id", lambda: metrics._start_wandb(tmp_path, config)),
    ):
        with pytest.raises(OSError) as raised:
            write()
        assert describe_error(raised.value) == f"{tmp_path / name}: the disk is full"
        assert list(tmp_path.iterdir()) == []
