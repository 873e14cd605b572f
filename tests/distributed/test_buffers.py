"""Buffers of a plugin's module: one on all ranks, in checkpoints and in exports, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cat_lm import mixers
from cat_lm.core.errors import SharedError, UserError
from cat_lm.export import export_checkpoint
from cat_lm.pretrained.loading import load_model
from cat_lm.training.building import build_model
from cat_lm.training.checkpoint.optimizer_state import persistent_buffers
from cat_lm.training.engine import Engine
from tests.checkpoints import seal
from tests.distributed.ranks import run_on_ranks
from tests.distributed.test_engine import VOCAB, make_config
from tests.distributed.trainers import opened
from tests.runs import losses, run_values

SHAPE = {"architecture": "mixer", "mixer": "features", "hidden_size": 32, "num_hidden_layers": 2}
SAVED = {f"model.layers.{i}.mixer.{n}" for i in (0, 1) for n in ("omega", "start", "order")}
SAVED |= {f"model.layers.{i}.mixer.{n}" for i in (0, 1) for n in ("one", "used")}
WEIGHTS = "model/model.safetensors"


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Knows the mixer in this process, where models are exported and loaded."""
    monkeypatch.setattr(mixers.MIXERS, "_entries", dict(mixers.MIXERS._entries))
    know()


def know() -> None:
    from tests.distributed.buffered import Features

    mixers.MIXERS._entries["features"] = Features()


def model_values(learns: str = "") -> dict[str, Any]:
    return SHAPE | {"mixer_options": {"learns": learns}}


def values_of(data: str, run: Path | str, learns: str = "", **train: Any) -> dict[str, Any]:
    values = run_values(Path(data), Path(run), **train)
    values["model"] = model_values(learns)
    values["checkpoint"] = {"every_steps": 2, "keep_last": 9}
    return values


def buffers_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in persistent_buffers(model).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and one[name].equal(other[name]) for name in one
    )


def built(ranks, cases: list[tuple[int, str]]) -> list[dict[str, torch.Tensor]]:
    know()
    found = []
    for stage, precision in cases:
        config = make_config(stage, 2, precision, model_values())
        model = build_model(config, VOCAB, weights=ranks.is_first)
        found.append(buffers_of(Engine(model, config, ranks).model))
    return found


def test_all_ranks_have_the_first_one_s():
    """Which are those that one process would have, rounded where training rounds its model."""
    cases = [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "fp32")]
    first, second = run_on_ranks(built, 2, cases)
    for (stage, precision), ours, theirs in zip(cases, first, second, strict=True):
        alone = buffers_of(build_model(make_config(stage, 1, precision, model_values()), VOCAB))
        if precision == "bf16":
            alone = {n: b.bfloat16() if b.is_floating_point() else b for n, b in alone.items()}
        assert ours.keys() == SAVED
        assert same(ours, theirs) and same(ours, alone), (stage, precision)


def trained(ranks, values: dict[str, Any]) -> tuple[str, dict[str, torch.Tensor]]:
    """What the run says at last, and its buffers."""
    from train import Trainer

    know()
    said: list[str] = []

    class Heard(Trainer):
        def run(self) -> int:
            line = self.log.line
            self.log.line = lambda text: (said.append(text), line(text))
            return super().run()

    try:
        with opened(Heard, ranks, values) as trainer:
            trainer.run()
            return said[-1], buffers_of(trainer.engine.model)
    except SharedError as error:
        return str(error), {}


@pytest.mark.parametrize(
    ("learns", "stages", "ranks", "precision"),
    [
        ("", (1, 3), (2, 1), "fp32"),
        ("", (3, 0), (1, 2), "bf16"),
        ("alone", (0, 0), (1, 1), "fp32"),
        ("together", (2, 1), (2, 2), "fp32"),
    ],
)
def test_a_run_goes_on_with_them(learns, stages, ranks, precision, tiny_corpus, tmp_path):
    """Killed after its save and resumed, it is the run that went on; the export has its buffers."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train = {"precision": precision, "micro_batch_size": 4}
    values = values_of(str(tiny_corpus), whole, learns, max_steps=4, zero_stage=stages[0], **train)
    line, straight = run_on_ranks(trained, ranks[0], values)[0]
    assert "finished: 4 steps" in line
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints/step-00000004")
    stored = load_file(parts / "checkpoints/step-00000002" / WEIGHTS)
    values = values_of(
        str(tiny_corpus), parts, learns, max_steps=4, zero_stage=stages[1], resume="auto", **train
    )
    outcomes = run_on_ranks(trained, ranks[1], values)
    assert all(same(outcomes[0][1], found) for _, found in outcomes)
    assert outcomes[0][1].keys() == straight.keys() >= SAVED
    if ranks[0] == ranks[1] and stages[0] == stages[1]:
        assert losses(parts) == losses(whole)
    for name, buffer in straight.items():
        close = {"rtol": 1e-5, "atol": 1e-6} if learns else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(outcomes[0][1][name].to(buffer.dtype), buffer, **close)
        changes = learns and name.endswith((".mean", ".start"))
        assert bool(changes) != stored[name].equal(buffer), name
    checkpoint = parts / "checkpoints/step-00000004"
    model = load_model(export_checkpoint(parts, tmp_path / "out"), device="cpu")
    found = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    for name, tensor in load_file(checkpoint / WEIGHTS).items():
        wanted = tensor.float() if tensor.is_floating_point() else tensor
        assert found[name].dtype == wanted.dtype and found[name].equal(wanted), name
    export_checkpoint(parts, tmp_path / "half", dtype="bfloat16")


@pytest.mark.parametrize("learns", ["turned", "own"])
def test_strides_and_what_a_rank_has_for_itself_stop_no_checkpoint(learns, tiny_corpus, tmp_path):
    values = values_of(str(tiny_corpus), tmp_path / "run", learns, max_steps=4)
    for line, found in run_on_ranks(trained, 2, values):
        assert "finished: 4 steps" in line
        stored = load_file(tmp_path / "run/checkpoints/step-00000002" / WEIGHTS)
        assert found.keys() == SAVED == {name for name in stored if name in found}
        assert all(stored[name].equal(buffer) for name, buffer in found.items())
        if learns == "turned":
            assert not found["model.layers.0.mixer.omega"].is_contiguous(), "what it is about"


def test_a_buffer_that_is_not_saved_is_one_line():
    with pytest.raises(UserError) as caught:
        build_model(make_config(1, 1, "fp32", model_values("lost")), VOCAB)
    said = "mixer features:learns=lost: RandomFeatures registers the buffer table "
    assert str(caught.value).startswith(said) and len(str(caught.value).splitlines()) == 1


def changed_checkpoints(ranks, data: str, folder: str) -> dict[str, str]:
    """What runs say that go on from a checkpoint whose buffers were changed."""
    first = Path(folder) / "first"
    trained(ranks, values_of(data, first, max_steps=2))
    name = "model.layers.0.mixer.omega"
    changes = {
        "absent": lambda t: t.pop(name),
        "another shape": lambda t: t.update({name: torch.zeros(32, 9)}),
        "not finite": lambda t: t[name].fill_(torch.nan),
    }
    found = {}
    for what, change in changes.items():
        run = Path(folder) / what
        shutil.copytree(first, run)
        step = run / "checkpoints/step-00000002"
        tensors = load_file(step / WEIGHTS)
        change(tensors)
        save_file(tensors, step / WEIGHTS, {"format": "pt"})
        seal(step)
        found[what], _ = trained(ranks, values_of(data, run, max_steps=4, resume="auto"))
    return found


def test_checkpoints_with_other_buffers_or_none(tiny_corpus, tmp_path):
    (found,) = run_on_ranks(changed_checkpoints, 1, str(tiny_corpus), str(tmp_path))
    assert "omega: the file has none, the model [32, 8]" in found["absent"]
    assert "omega: the file has [32, 9], the model [32, 8]" in found["another shape"]
    assert "not finite" in found["not finite"]


def test_a_model_of_the_project_has_none_to_save():
    """So that its checkpoints are what they were."""
    for values in ({"mixer": "gla", "mixer_options": {"heads": 2}}, {"mixer": "mamba"}):
        model = build_model(make_config(1, 1, "fp32", SHAPE | values), VOCAB)
        assert not persistent_buffers(model)
    model = build_model(make_config(1, 1, "fp32"), VOCAB)
    assert not persistent_buffers(model) and list(model.buffers())


def test_a_run_begins_from_a_model_with_buffers(tiny_corpus, tmp_path):
    values = values_of(str(tiny_corpus), tmp_path / "one", max_steps=2)
    ((_, first),) = run_on_ranks(trained, 1, values)
    out = export_checkpoint(tmp_path / "one", tmp_path / "out")
    values = values_of(str(tiny_corpus), tmp_path / "two", max_steps=1, seed=5, init_from=str(out))
    for line, found in run_on_ranks(trained, 2, values):
        assert "finished: 1 steps" in line and same(first, found)
