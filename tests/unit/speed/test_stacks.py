"""eval.speed stacks: models of recall that train as one."""

from __future__ import annotations

import pytest
import torch

STACKS = ("stacks", "--d-model", 16, "--seq-len", 16, "--batch-size", 4, "--repeats", 2)


def test_stacks_record(speed):
    mixers = ("attention", "cat")
    code, record, out, err = speed(*STACKS, "--mixers", ",".join(mixers), "--models", "1,3")
    assert code == 0, err
    assert record["refused"] == [] and record["case"]["sizes"] == [1, 3]
    rows = [(row["mixer"], row["models"]) for row in record["results"]]
    assert rows == [(mixer, models_) for mixer in mixers for models_ in (1, 3)]
    for row in record["results"]:
        seconds = row["step_seconds"]["median"]
        assert len(row["step_seconds"]["all"]) == 2 and row["measured_bytes"] is None
        assert row["model_steps_per_second"] == pytest.approx(row["models"] / seconds)
        first = record["results"][2 * mixers.index(row["mixer"])]
        expected = row["model_steps_per_second"] / first["model_steps_per_second"]
        assert row["times_as_fast_as_the_first"] == pytest.approx(expected)
        assert row["estimated_bytes"] == row["models"] * first["estimated_bytes"] > 0
        assert row["mixer"] in out


def test_a_mixer_that_fails_does_not_stop_the_others(speed, monkeypatch):
    from eval.speed.model import stacks

    train_step = stacks.train_step

    def failing(stack, trials, rows):
        if trials[0].cell.mixer == "attention":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return train_step(stack, trials, rows)

    monkeypatch.setattr(stacks, "train_step", failing)
    code, record, out, err = speed(*STACKS, "--mixers", "attention,cat", "--models", "2")
    assert code == 1 and "1 stacks are wrong and refused" in err
    assert [row["mixer"] for row in record["results"]] == ["cat"]
    (refused,) = record["refused"]
    assert refused["case"] == "attention, 2 as one" and "out of memory" in refused["reason"]
    assert "refused: attention, 2 as one" in out
