"""Buffers of a plugin's module: one on all ranks, in checkpoints and in exports, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cat_lm import mixers
from cat_lm.core.errors import SharedError, UserError
from cat_lm.export import export_checkpoint
from cat_lm.pretrained.loading import load_model
from cat_lm.training.building import build_model
from cat_lm.training.checkpoint.optimizer_state import persistent_buffers
from tests.distributed.buffered import Features
from tests.distributed.ranks import run_on_ranks
from tests.distributed.test_engine import VOCAB, make_config
from tests.distributed.trainers import opened
from tests.runs import losses, run_values

SHAPE = {"architecture": "mixer", "mixer": "features", "hidden_size": 32, "num_hidden_layers": 2}
BUFFERS = ("omega", "start", "order", "one", "used")
SAVED = {f"model.layers.{i}.mixer.{name}" for i in (0, 1) for name in BUFFERS}
WEIGHTS = "model/model.safetensors"
OMEGA = "model.layers.0.mixer.omega"


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Know the mixer in this process, where models are exported and loaded."""
    monkeypatch.setattr(mixers.MIXERS, "_entries", {**mixers.MIXERS._entries})
    know()


def know() -> None:
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


def trained(ranks, values: dict[str, Any]) -> tuple[str, dict[str, torch.Tensor]]:
    """Return how a run ends, and its buffers."""
    from train import Trainer

    know()
    try:
        with opened(Trainer, ranks, values) as trainer:
            return f"code {trainer.run()}", buffers_of(trainer.engine.model)
    except SharedError as error:
        return str(error), {}


@pytest.mark.parametrize(
    ("learns", "stages", "ranks", "precision"),
    [
        ("", (3, 0), (1, 2), "bf16"),
        ("together", (2, 1), (2, 2), "fp32"),
        pytest.param("", (1, 3), (2, 1), "fp32", marks=pytest.mark.long),
        pytest.param("together", (0, 0), (1, 1), "fp32", marks=pytest.mark.long),
    ],
)
def test_run_resumes_with_its_buffers(learns, stages, ranks, precision, tiny_corpus, tmp_path):
    """Killed after its save and resumed, it is the run that went on; the export has its buffers."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train = {"precision": precision, "micro_batch_size": 4, "max_steps": 4}
    values = values_of(str(tiny_corpus), whole, learns, zero_stage=stages[0], **train)
    line, straight = run_on_ranks(trained, ranks[0], values)[0]
    assert line == "code 0"
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints/step-00000004")
    stored = load_file(parts / "checkpoints/step-00000002" / WEIGHTS)
    train |= {"resume": "auto", "zero_stage": stages[1]}
    outcomes = run_on_ranks(trained, ranks[1], values_of(str(tiny_corpus), parts, learns, **train))
    assert all(same(outcomes[0][1], found) for _, found in outcomes)
    assert outcomes[0][1].keys() == straight.keys() >= SAVED
    if ranks[0] == ranks[1] and stages[0] == stages[1]:
        assert losses(parts) == losses(whole)
    for name, buffer in straight.items():
        close = {"rtol": 1e-5, "atol": 1e-6} if learns else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(outcomes[0][1][name].to(buffer.dtype), buffer, **close)
        changes = learns and name.endswith((".mean", ".start"))
        assert bool(changes) != stored[name].equal(buffer), name
    model = load_model(export_checkpoint(parts, tmp_path / "out"), device="cpu")
    found = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    for name, tensor in load_file(parts / "checkpoints/step-00000004" / WEIGHTS).items():
        wanted = tensor.float() if tensor.is_floating_point() else tensor
        assert found[name].dtype == wanted.dtype and found[name].equal(wanted), name
    # Another run begins from the export, whatever its own seed would draw.
    values = values_of(str(tiny_corpus), tmp_path / "new", learns, max_steps=1, seed=5)
    values["train"]["init_from"] = str(tmp_path / "out")
    (_, begun), *_ = run_on_ranks(trained, ranks[1], values)
    assert begun[OMEGA].equal(found[OMEGA])


def test_buffer_that_is_not_saved_raises_user_error():
    with pytest.raises(UserError) as caught:
        build_model(make_config(1, 1, "fp32", model_values("lost")), VOCAB)
    said = "mixer features:learns=lost: RandomFeatures registers the buffer table "
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)
