"""The optimizer of tests/own_ideas on two ranks: the same losses, and exact resuming."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.distributed.ranks import run_on_ranks
from tests.distributed.test_elastic import step_losses
from tests.distributed.test_muon import TOLERANCE, values_of
from tests.distributed.trainers import TERM, train


def lion_runs(ranks, data: str, folder: str) -> None:
    """Train without a break, and again with one, which a signal makes."""
    runpy.run_path(str(REPOSITORY / "tests/own_ideas/optimizer.py"))
    for name, signals in (("straight", {}), ("ended", {2: TERM})):
        run = Path(folder) / f"{name}-{ranks.world_size}"
        values = values_of(data, run, stage=ranks.world_size - 1, precision="fp32")
        values["optimizer"] |= {"name": "lion", "options": {"a": 0.8}, "lr": 2e-3}
        if signals:
            assert train(ranks, values, signals) != 0
            values["train"]["resume"] = "auto"
        assert train(ranks, values) == 0


@pytest.mark.long
def test_runs_agree_on_two_ranks_and_resume_exactly(tiny_corpus, tmp_path):
    for ranks in (1, 2):
        run_on_ranks(lion_runs, ranks, str(tiny_corpus), str(tmp_path))
        ended, straight = (
            step_losses(tmp_path / f"{name}-{ranks}") for name in ("ended", "straight")
        )
        assert ended == straight
    alone, shared = (step_losses(tmp_path / f"straight-{ranks}") for ranks in (1, 2))
    assert len(alone) == 6 and alone[6] < alone[1]
    assert shared == pytest.approx(alone, abs=TOLERANCE)
