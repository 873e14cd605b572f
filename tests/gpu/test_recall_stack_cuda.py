"""Stacks of small models on a CUDA GPU: they equal their models alone, and fit as was estimated."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cat_lm import mixers
from cat_lm.mixers import make_mixer
from eval.lab import estimate, execution
from eval.lab.execution import Execution
from eval.recall.cell import DROPOUT, Cell
from eval.recall.training import run_stack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

BASE = Cell(
    "mqar:vocab_size=64",
    "cat:dropout=0",
    32,
    32,
    epochs=1,
    train_examples=320,
    test_examples=100,
    batch_size=64,
    stop_above=None,
    test_lengths=(64,),
)


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """No draws that models alone do not share, and no TF32."""
    monkeypatch.setitem(DROPOUT, "layer", 0.0)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.parametrize("name", mixers.names())
def test_a_stack_equals_its_models_alone(name):
    mixer = f"{name}:dropout=0" if hasattr(make_mixer(name).options, "dropout") else name
    alike = [
        dataclasses.replace(BASE, mixer=mixer, lr=lr, seed=seed)
        for lr, seed in ((1e-3, 0), (3e-3, 1), (1e-2, 0))
    ]
    for cell, record in run_stack(alike, "cuda"):
        alone = cell.run("cuda", quiet=True)
        losses = [[point["loss"] for point in r["history"]] for r in (record, alone)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)
        for test, found in record["tests"].items():
            assert found["accuracy"] == pytest.approx(alone["tests"][test]["accuracy"], abs=0.01)


def test_auto_stacks_all_of_a_kind_and_they_are_timed_together():
    alike = [dataclasses.replace(BASE, seed=seed) for seed in range(6)]
    groups = execution.stacks(alike, Execution("cuda"))
    assert [len(group) for group in groups] == [6]
    (hours,) = estimate.hours_by_mixer(groups, "cuda").values()
    assert 0 < hours < 1


@pytest.mark.parametrize("name", ["cat", "attention", "mamba", "deltanet", "gla", "based"])
def test_a_model_takes_no_more_memory_than_is_set_aside_for_it(name):
    cell = dataclasses.replace(
        BASE, task="mqar", mixer=name, d_model=64, seq_len=64, batch_size=512, test_lengths=()
    )
    cell = dataclasses.replace(cell, train_examples=512)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    list(run_stack([dataclasses.replace(cell, seed=seed) for seed in range(2)], "cuda"))
    taken = torch.cuda.max_memory_allocated() - before
    assert taken <= 2 * cell.bytes_needed()
