"""`train.deterministic`, and the attention kernels that the log names."""

from __future__ import annotations

import os
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from cat_lm.config import RunConfig
from cat_lm.training import building
from cat_lm.training.preflight import dry_run
from tests.runs import run_values
from tests.tiny_models import cat_model, random_ids


@pytest.fixture
def restored(monkeypatch):
    """What `make_deterministic` sets for the rest of a process is set back."""
    for name in ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
        monkeypatch.setenv(name, "")
    filled = torch.utils.deterministic.fill_uninitialized_memory
    yield monkeypatch
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled


def refusal() -> RuntimeError | None:
    """What torch says of an operator that has no deterministic form on a CPU either."""
    try:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    except RuntimeError as error:
        return error
    return None


def flash_keywords() -> dict:
    """What transformers hands to a flash-attn of today."""
    from transformers.modeling_flash_attention_utils import _process_flash_attention_kwargs

    return _process_flash_attention_kwargs(
        8, 8, is_causal=True, supports_mapping=defaultdict(bool, deterministic=True)
    )


@pytest.mark.parametrize(("given", "kept"), [("", ":4096:8"), (":0:0", ":4096:8"), (":16:8",) * 2])
def test_torch_and_cublas_are_told(restored, given, kept):
    restored.setenv("CUBLAS_WORKSPACE_CONFIG", given)
    assert refusal() is None and not flash_keywords()["deterministic"]
    building.make_deterministic()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == kept
    assert flash_keywords()["deterministic"]
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert dry_run.refused_operator(refusal()) == "put_"
    assert dry_run.refused_operator(RuntimeError("out of memory")) is None


@pytest.mark.parametrize("asked", [True, False])
def test_trainer_asks_for_it_before_all_else(asked, monkeypatch):
    from train import Trainer

    called = []
    monkeypatch.setattr(building, "make_deterministic", lambda: called.append(True))
    config = RunConfig.model_validate(run_values("unused", "unused", deterministic=asked))
    with pytest.raises(AttributeError, match="broadcast"):  # the first thing that it asks of ranks
        Trainer(config, SimpleNamespace(), None, None)
    assert called == [True] * asked


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"attn_implementation": "sdpa"}, "ScaledDotProductFlashAttentionForCpu"),
        ({"attn_implementation": "eager"}, "no fused kernel"),
    ],
)
def test_graph_names_kernels_of_attention(settings, expected):
    ids = random_ids(2, 16)
    loss = cat_model(**settings).train()(ids, labels=ids).loss
    assert dry_run.attention_kernels(loss) == expected


def test_compiled_graph_is_said_to_be_one():
    class CompiledFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

    loss = CompiledFunction.apply(torch.ones(2, requires_grad=True)).sum()
    assert dry_run.attention_kernels(loss) == "inside the compiled graph"
