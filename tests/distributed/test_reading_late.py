"""On a GPU a step's numbers are read while the next one is computed: records stay what they are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from cat_lm.training.checkpoint import complete_checkpoints
from cat_lm.training.engine import LaunchedStep, Moment, StepResult
from tests.distributed.ranks import run_on_ranks
from tests.distributed.trainers import TERM, error_of, train
from tests.runs import losses, records, run_values

CPU, GPU = torch.device("cpu"), torch.device("cuda")
RESTS = (5, 6, 10, 12)  # a checkpoint or a validation follows these


def test_host_waits_for_the_step_only():
    """The numbers leave behind it; their reading waits for them and nothing launched later."""
    calls = mock.Mock()
    calls.host.tolist.return_value = [4.0, 0.5, 8.0, 1.0, 0.0]
    numbers = SimpleNamespace(device=GPU, shape=(5,), dtype=torch.float64)
    with (
        mock.patch.object(torch, "empty", lambda *_, pin_memory, **__: pin_memory and calls.host),
        mock.patch.object(torch.cuda, "Event", lambda enable_timing: enable_timing and calls.event),
    ):
        launched = LaunchedStep(numbers, applied=True, started=Moment(GPU))
        marked = mock.call.event.record()
        before = [marked, mock.call.host.copy_(numbers, non_blocking=True), marked]
        assert calls.mock_calls == before
        assert launched.result() == StepResult(2.0, 0.5, False, (1.0, 0.0))
        after = [mock.call.event.synchronize(), mock.call.host.tolist()]
        assert calls.mock_calls == before + after
    ready, now = torch.tensor([4.0, float("nan"), 8.0], dtype=torch.float64), Moment(CPU)
    assert LaunchedStep(ready, applied=True, started=now).result().skipped
    assert LaunchedStep(ready.nan_to_num(), applied=False, started=now).result().skipped


def test_step_takes_what_the_device_took(monkeypatch):
    """Of two steps launched at once each has its own time, and not the one both and one none."""

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = milliseconds.pop(0)

        def elapsed_time(self, later):
            return later.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: mock.Mock())
    numbers = SimpleNamespace(device=GPU, shape=(3,), dtype=torch.float64)
    milliseconds = [1000, 1200, 1001, 1450]  # the second starts behind the first
    first = LaunchedStep(numbers, applied=True, started=Moment(GPU))
    second = LaunchedStep(numbers, applied=True, started=Moment(GPU))
    assert (first.seconds(), second.seconds(after=first)) == (0.2, 0.25)


class At(Moment):
    """A moment of a device that takes four seconds for a step, and begins one every ten."""

    def __init__(self, seconds: float) -> None:
        self._event, self._seconds = None, seconds


def reading(late: bool, readings: list, skip_from: int = 99):
    """Have a trainer note (step, newest step launched) at each reading."""

    def prepare(trainer) -> None:
        trainer.reads_late, launch = late, trainer.engine.launch_step

        def launch_step(*given):
            launched, step = launch(*given), trainer.step
            launched._started, launched._ended = At(10 * step), At(10 * step + 4)
            result = launched.result

            def read():
                readings.append((step, trainer.step))
                if step >= skip_from:
                    return StepResult(float("nan"), float("nan"), True, (0.0, 0.0))
                return result()

            launched.result = read
            return launched

        trainer.engine.launch_step = launch_step

    return prepare


def all_cases(ranks, data: str, folder: str) -> dict[str, list]:
    found = {}

    def note(name: str, values: dict, late: bool, signals: dict) -> None:
        readings = []
        code = train(ranks, values, signals, prepare=reading(late, readings))
        found[name] = [code, readings]

    for late in (False, True):
        note(f"whole-{late}", run_values(data, Path(folder) / f"whole-{late}"), late, {})
        values = run_values(data, Path(folder) / f"stopped-{late}")
        note(f"stopped-{late}", values, late, {7: TERM})
    values["train"]["resume"] = "auto"
    note("continued", values, True, {})
    values = run_values(data, Path(folder) / "skipped", max_skipped_steps=2)
    found["skipped"] = error_of(ranks, values, prepare=reading(True, [], skip_from=7))
    return found


def test_late_reading_keeps_records_and_checkpoints(tiny_corpus, tmp_path):
    found, other = run_on_ranks(all_cases, 2, str(tiny_corpus), str(tmp_path))
    assert found == other
    assert found["whole-False"] == [0, [(step, step) for step in range(1, 13)]]
    assert found["whole-True"] == [0, [(s, s + (s not in RESTS)) for s in range(1, 13)]]
    assert losses(tmp_path / "whole-True") == losses(tmp_path / "whole-False")
    for late in (False, True):
        for record in (r for r in records(tmp_path / f"whole-{late}") if "loss" in r):
            # From the end of the step before, or, after a rest, from when its batch was asked for.
            goes_on = late and record["step"] - 1 not in (0, *RESTS)
            wanted = 10.0 if goes_on else 4.0 + record["data_seconds"]
            assert record["step_seconds"] == wanted and record["data_seconds"] > 0
    # The signal came after the seventh step; the eighth carries it to all ranks, and late the
    # ninth is on its way when they read it.
    for late, last in ((False, 8), (True, 9)):
        code, readings = found[f"stopped-{late}"]
        assert (code, readings[-1][0]) == (75, last)
    newest = complete_checkpoints(tmp_path / "stopped-False" / "checkpoints")[-1]
    assert newest.name == "step-00000008"
    assert found["continued"][1][0] == (10, 10)
    assert losses(tmp_path / "stopped-True") == losses(tmp_path / "whole-False")
    # The eighth is known to have been bad when the ninth is on its way.
    assert found["skipped"].startswith("2 steps in a row were not finite")
    log = (tmp_path / "skipped" / "train.log").read_text()
    assert "step 7: loss nan" in log and "step 8: loss nan" in log and "step 9:" not in log
    assert [r["step"] for r in records(tmp_path / "skipped")] == [1, 2, 3, 4, 5, 6, 6, 7, 8]
