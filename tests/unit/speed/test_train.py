"""eval.speed train: families side by side, a run's own step, the rotation compiled."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from cat_lm.counts import count_parameters, flops_per_token, meta_model
from cat_lm.training.engine import Engine
from eval.speed import choices, models, train
from eval.speed.timing import WARM_UPS
from tests.distributed.ranks import run_on_ranks
from tests.unit.speed.calls import TINY

MODELS = choices.models()


def test_train_record(speed):
    names = ("pythia", "mh_cat")
    code, record, out, err = speed(
        *("train", *TINY, "--context-length", 16, "--batch-size", 2, "--repeats", 2),
        *("--models", ",".join(names), "--peak-tflops", 0.5),
    )
    assert code == 0, err
    assert tuple(record["results"]) == names
    assert set(record["largest_relative_logit_difference"]) == {"pythia", "mh_cat"}
    assert max(record["largest_relative_logit_difference"].values()) < 1e-5
    for name, row in record["results"].items():
        size = models.ModelSize(1, 32, 2, 61, 3, "float32", "cpu")
        model = models.build(size, name, 16)
        assert row["parameters"] == count_parameters(model)
        flops = 32 * flops_per_token(meta_model(models.model_config(size, name, 16)), 16)
        assert row["flops_per_step"] == flops
        seconds = row["step_seconds"]["median"]
        assert row["tokens_per_second"] == pytest.approx(32 / seconds)
        assert row["mfu"] == pytest.approx(flops / seconds / 0.5e12)
        assert row["peak_memory_bytes"] >= 0
        assert row["model"] in out
    pythia = record["results"]["pythia"]
    assert pythia["relative_to_plain"] == 1 and pythia["relative_range"] == [1, 1]
    assert pythia["relative_to_pythia"] == 1 and pythia["relative_to_pythia_range"] == [1, 1]
    assert record["step"] == "forward and backward" and record["absent"] == {}
    assert record["results"]["mh_cat"]["convolution"].startswith("multihead convolution")


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


def test_a_run_s_own_step_is_timed():
    """Of transformers' own class too, whose norms do not say what decays."""
    (record,) = run_on_ranks(steps_of_runs, 1)
    assert record["step"].startswith("a run's own")
    assert set(record["rates"]) == {(0.0, 1.0, 1)} and len(record["rates"]) == 1 + WARM_UPS
    assert record["results"]["llama-stock"]["peak_memory_bytes"] is None


def test_a_run_s_step_is_where_training_is(speed):
    device = mock.MagicMock()
    device.__enter__.return_value.device = torch.device("cuda", 0)
    with mock.patch("cat_lm.training.distributed.start", return_value=device):
        code, record, _, err = speed("train", *TINY, "--optimizer", "--models", "pythia")
    assert (code, record) == (2, None)
    assert "--device cpu: a run's own step is on cuda here" in err.splitlines()[-1]


def test_the_rotation_is_compiled_for_its_model_alone(monkeypatch):
    calls = []

    def compile_(eager, dynamic):
        def rotate(*arguments):
            calls.append(arguments[0].shape)
            return eager(*arguments)

        return rotate

    monkeypatch.setattr(torch, "compile", compile_)
    size = models.ModelSize(2, 32, 2, 61, 3, "float32", "cpu")
    names = ("pythia", "pythia-compiled-rotary", "stock")
    built = {name: models.build(size, name, 16) for name in names}
    ids = models.random_ids(size, 2, 9)
    assert models.compile_rotation(built[names[1]], ids) is None
    assert len(calls) == 2 and all(p.grad is None for p in built[names[1]].parameters())
    assert models.check_logits(built, ids, "float32")[names[1]] < 1e-5
    assert len(calls) == 4  # of two layers; the other models rotate as they did
    assert not MODELS["pythia"].compiled_rotation and MODELS[names[1]].stock == "stock"


def test_what_does_not_compile_is_absent(speed, monkeypatch):
    def compile_(eager, dynamic):
        def rotate(*arguments):
            raise RuntimeError("no C++ compiler\nwas found")

        return rotate

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(train, "_peak_memories", lambda case, names: dict.fromkeys(names, 0))
    few = (*TINY, "--context-length", 16, "--batch-size", 2, "--repeats", 1, "--models")
    code, record, out, err = speed("train", *few, "pythia,pythia-compiled-rotary")
    assert code == 0 and record["results"].keys() == {"pythia"}
    reason = "torch.compile failed: RuntimeError: no C++ compiler was found"
    assert record["absent"] == {"pythia-compiled-rotary": reason}
    assert f"absent: pythia-compiled-rotary: {reason}" in out
    code, record, out, err = speed("train", *few, "pythia-compiled-rotary")
    assert (code, record, out) == (2, None, "")
    assert err.splitlines()[-1] == f"error: --models: pythia-compiled-rotary: {reason}"
    code, record, out, err = speed("train", *few, "llama-compiled-rotary", "--compile")
    assert code == 2 and "--compile compiles the rotation of every model" in err


def test_families_side_by_side(speed, monkeypatch):
    monkeypatch.setattr(train, "_peak_memories", lambda case, names: dict.fromkeys(names, 0))
    names = ("llama-head", "mixer-mamba", "llama", "llama-stock", "pythia", "gla")
    code, record, out, err = speed(
        *("train", *TINY, "--context-length", 16, "--batch-size", 2, "--repeats", 2),
        *("--models", ",".join(names)),
    )
    assert code == 0, err
    rows = record["results"]
    assert tuple(rows) == names and "Mixer, mamba" in out
    # Each is held against its own family: what transformers has of it, and its plain model.
    assert set(record["largest_relative_logit_difference"]) == {"llama-head", "llama", "pythia"}
    assert rows["llama"]["relative_to_plain"] == rows["pythia"]["relative_to_plain"] == 1
    assert rows["mixer-mamba"]["relative_to_plain"] is None
    assert rows["llama-stock"]["relative_to_plain"] > 0
    # And every one against Pythia, round by round.
    assert rows["gla"]["relative_to_plain"] is None
    for row in rows.values():
        rounds = zip(rows["pythia"]["step_seconds"]["all"], row["step_seconds"]["all"], strict=True)
        ratios = [pythia / own for pythia, own in rounds]
        assert row["relative_to_pythia"] == pytest.approx(sum(ratios) / 2)
        assert row["relative_to_pythia_range"] == [min(ratios), max(ratios)]
        assert f"{row['relative_to_pythia']:.3f}" in out
    assert rows["llama-stock"]["parameters"] == rows["llama"]["parameters"]


def test_without_pythia_its_column_is_blank(speed, monkeypatch):
    monkeypatch.setattr(train, "_peak_memories", lambda case, names: dict.fromkeys(names, 0))
    arguments = ("--context-length", 16, "--batch-size", 2, "--repeats", 1, "--models", "gla")
    code, record, out, err = speed("train", *TINY, *arguments)
    assert code == 0, err
    row = record["results"]["gla"]
    assert row["relative_to_pythia"] is row["relative_to_pythia_range"] is None
    _, header, line = out.splitlines()
    assert "of Pythia" in header and line.split()[-2:] == ["unknown", "0"]
    # Name, tokens a second and their range, MFU, peak memory.
    assert len(line.split()) == 5


def test_wrong_model_is_not_timed(speed, monkeypatch):
    build = models.build

    def spoiled(size, name, positions):
        model = build(size, name, positions)
        if name == "cat":
            for name_, parameter in model.named_parameters():
                if name_.endswith("q_filter"):
                    parameter.data = parameter.data.roll(1, dims=-1)
        return model

    monkeypatch.setattr(train, "build", spoiled)
    monkeypatch.setattr(train, "time_in_turn", lambda *_, **__: pytest.fail("timed"))
    code, record, out, err = speed("train", *TINY, "--context-length", 16, "--models", "cat")
    assert (code, record, out) == (2, None, "")
    assert "logits differ" in err.splitlines()[-1] and "'cat'" in err
