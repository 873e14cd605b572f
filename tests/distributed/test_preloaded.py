"""What forked processes have imported before: a training run must find everything heavy there."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.distributed.ranks import run_on_ranks
from tests.distributed.trainers import opened
from tests.runs import run_values

# A rank may import so many modules itself; transformers' and torch's heavy parts are hundreds.
MOST = 60


def imported_by_a_run(ranks, values: dict) -> list[str]:
    before = set(sys.modules)
    from train import Trainer

    with opened(Trainer, ranks, values) as trainer:
        trainer.run()
    return sorted(set(sys.modules) - before)


def test_a_run_imports_little_itself(tiny_corpus: Path, tmp_path: Path):
    values = run_values(tiny_corpus, tmp_path / "run", max_steps=2)
    (names,) = run_on_ranks(imported_by_a_run, 1, values)
    assert len(names) < MOST, names
