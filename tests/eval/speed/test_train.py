"""eval.speed train: families side by side, a run's own step, wrong models refused."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from cat_lm.counts import count_parameters, flops_per_token, meta_model
from cat_lm.training.engine import Engine
from eval.speed import models, train
from eval.speed.timing import WARM_UPS
from tests.distributed.ranks import run_on_ranks

FEW = ("--context-length", 16, "--batch-size", 2, "--repeats", 2, "--models")


@pytest.mark.long
def test_peak_memory_is_that_of_a_process_of_its_own():
    size = models.ModelSize(1, 64, 2, 1021, 3, "float32", "cpu")
    memory = train._peak_memories(train.TrainCase(size, 8, 256), ["pythia"])
    assert memory["pythia"] > 8 * 256 * 1021 * 4  # the logits at least


def test_record_has_speed_and_memory(speed, monkeypatch):
    monkeypatch.setattr(train, "_peak_memories", lambda case, names: dict.fromkeys(names, 2**20))
    code, record, out, err = speed("train", *FEW, "mh_cat", "--peak-tflops", 0.5)
    assert code == 0, err
    assert record["step"] == "forward and backward"
    assert record["largest_relative_logit_difference"]["mh_cat"] < 1e-5
    ((name, row),) = record["results"].items()
    size = models.ModelSize(1, 32, 2, 61, 3, "float32", "cpu")
    assert row["parameters"] == count_parameters(models.build(size, name, 16))
    flops = 32 * flops_per_token(meta_model(models.model_config(size, name, 16)), 16)
    seconds = row["step_seconds"]["median"]
    assert row["flops_per_step"] == flops
    assert row["tokens_per_second"] == pytest.approx(32 / seconds)
    assert row["mfu"] == pytest.approx(flops / seconds / 0.5e12)
    assert row["peak_memory_bytes"] == 2**20 and row["model"] in out
    assert row["convolution"].startswith("multihead convolution")


def test_families_are_compared_with_their_own_and_with_pythia(speed, monkeypatch):
    monkeypatch.setattr(train, "_peak_memories", lambda case, names: dict.fromkeys(names, 0))
    names = ("llama-head", "mixer-mamba", "llama", "llama-stock", "pythia", "gla")
    code, record, out, err = speed("train", *FEW, ",".join(names))
    assert code == 0, err
    rows = record["results"]
    assert tuple(rows) == names and "Mixer, mamba" in out
    assert set(record["largest_relative_logit_difference"]) == {"llama-head", "llama", "pythia"}
    assert rows["llama"]["relative_to_plain"] == rows["pythia"]["relative_to_plain"] == 1
    assert rows["mixer-mamba"]["relative_to_plain"] is rows["gla"]["relative_to_plain"] is None
    assert rows["llama-stock"]["relative_to_plain"] > 0
    for row in rows.values():
        rounds = zip(rows["pythia"]["step_seconds"]["all"], row["step_seconds"]["all"], strict=True)
        ratios = [pythia / own for pythia, own in rounds]
        assert row["relative_to_pythia"] == pytest.approx(sum(ratios) / 2)
        assert row["relative_to_pythia_range"] == [min(ratios), max(ratios)]
        assert f"{row['relative_to_pythia']:.3f}" in out
    assert rows["llama-stock"]["parameters"] == rows["llama"]["parameters"]
    code, record, out, err = speed("train", *FEW, "gla")
    assert code == 0 and record["results"]["gla"]["relative_to_pythia"] is None
    _, header, line = out.splitlines()
    assert "of Pythia" in header and len(line.split()) == 5  # name, speed, range, MFU, memory


def steps_of_runs(ranks) -> dict:
    """What `train --optimizer` measures, with the rates that its optimizers were given."""
    engine, rates = Engine.train_step, []

    def train_step(self, batch, lr):
        rates.append((lr, self.config.optimizer.grad_clip, self.config.train.zero_stage))
        return engine(self, batch, lr)

    size = models.ModelSize(1, 32, 2, 61, 3, "bfloat16", "cpu")
    case = train.TrainCase(size, 2, 16, optimizer=True)
    with (
        mock.patch("cat_lm.training.distributed.start") as start,
        mock.patch.object(Engine, "train_step", train_step),
    ):
        start.return_value.__enter__.return_value = ranks
        record = train.train_speed(case, ("llama-stock",), 1, peak_memory=False)
    return {**record, "rates": rates}


@pytest.mark.long
def test_own_step_of_a_run_is_timed():
    """Of transformers' own class too, whose norms do not say what decays."""
    (record,) = run_on_ranks(steps_of_runs, 1)
    assert record["step"].startswith("a run's own")
    assert set(record["rates"]) == {(0.0, 1.0, 1)} and len(record["rates"]) == 1 + WARM_UPS
    assert record["results"]["llama-stock"]["peak_memory_bytes"] is None


def test_own_step_of_a_run_is_where_training_is(speed):
    device = mock.MagicMock()
    device.__enter__.return_value.device = torch.device("cuda", 0)
    with mock.patch("cat_lm.training.distributed.start", return_value=device):
        code, record, _, err = speed("train", "--optimizer", "--models", "pythia")
    assert (code, record) == (2, None)
    assert "--device cpu: a run's own step is on cuda here" in err.splitlines()[-1]


def test_wrong_model_is_not_timed(speed, monkeypatch):
    build = models.build

    def spoiled(size, name, positions):
        model = build(size, name, positions)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("q_filter"):
                parameter.data = parameter.data.roll(1, dims=-1)
        return model

    monkeypatch.setattr(train, "build", spoiled)
    monkeypatch.setattr(train, "time_in_turn", lambda *_, **__: pytest.fail("timed"))
    code, record, out, err = speed("train", *FEW, "cat")
    assert (code, record, out) == (2, None, "")
    assert "logits differ" in err.splitlines()[-1] and "'cat'" in err
