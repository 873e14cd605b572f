"""Every family trains on several ranks, is interrupted and goes on, exactly and elsewhere.

The models are those of `tests/unit/test_families.py`. Dropout, other saves and all changes of ranks
and stages are tested with one family, in test_resume.py and test_elastic.py.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cat_lm.training.stop import REQUEUE_EXIT_CODE
from tests.distributed.ranks import run_on_ranks
from tests.distributed.trainers import opened
from tests.runs import losses, run_values
from tests.unit.test_families import CASES, SHARED

STEPS, STOPPED_AT = 6, 3
# (stage, precision) of a case; one rank goes on with stage 3 − stage. Only stage 3 takes parameters
# from the modules; what the others divide is the optimizer's, which knows no family: of them each
# family has one.
WHOLE = [(1, "fp32"), (0, "bf16"), (2, "fp32")]
SHORT = [("mamba2", 3, "bf16"), ("gla", 1, "fp32")]
LONG = [(case, 3, "bf16") for case in CASES]
LONG += [(case, *WHOLE[number % len(WHOLE)]) for number, case in enumerate(CASES)]
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}  # of losses that other ranks sum up in another order


def values_of(data: str, run: Path, case: str, stage: int, precision: str, **train: Any) -> dict:
    values = run_values(data, run, zero_stage=stage, precision=precision, max_steps=STEPS, **train)
    family = case.partition(":")[0]
    values["model"] = {"architecture": family, **SHARED, **CASES[case]}
    values["data"]["mask_documents"] = True
    values["validation"] = {"every_steps": STEPS, "max_tokens": 256}
    values["checkpoint"] = {"every_steps": STEPS}
    return values


def train(ranks, values: dict, stop: bool = False) -> int:
    """Run train.py's Trainer; with `stop` it gets a signal at step STOPPED_AT."""
    from train import Trainer

    class Stopped(Trainer):
        def train_step(self, batch, waited):
            super().train_step(batch, waited)
            if stop and self.step == STOPPED_AT and ranks.rank == ranks.world_size - 1:
                os.kill(os.getpid(), signal.SIGTERM)

    with opened(Stopped, ranks, values) as trainer:
        return trainer.run()


def on_two_ranks(ranks, data: str, folder: str, cases: list[tuple]) -> list[list[int]]:
    """Train straight, and stopped and gone on."""
    codes = []
    for case, stage, precision in cases:
        run = Path(folder) / f"{case}-{stage}-{precision}"
        found = [train(ranks, values_of(data, run / "straight", case, stage, precision))]
        values = values_of(data, run / "stopped", case, stage, precision, resume="auto")
        codes.append([*found, train(ranks, values, stop=True), train(ranks, values)])
    return codes


def on_one_rank(ranks, data: str, folder: str, cases: list[tuple]) -> list[int]:
    """Go on from where two ranks were stopped, with another stage."""
    codes = []
    for case, stage, precision in cases:
        run = Path(folder) / f"{case}-{stage}-{precision}"
        start = min((run / "stopped/checkpoints").glob("step-*[0-9]"))
        values = values_of(data, run / "alone", case, 3 - stage, precision, resume=str(start))
        codes.append(train(ranks, values))
    return codes


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SHORT, id="every stage"),
        # All families: minutes.
        pytest.param([c for c in LONG if c not in SHORT], id="others", marks=pytest.mark.long),
    ],
)
def test_every_family_is_stopped_and_goes_on(cases, tiny_corpus, tmp_path):
    given = (str(tiny_corpus), str(tmp_path), cases)
    for codes_of_rank in run_on_ranks(on_two_ranks, 2, *given):
        assert codes_of_rank == [[0, REQUEUE_EXIT_CODE, 0]] * len(cases)
    assert run_on_ranks(on_one_rank, 1, *given) == [[0] * len(cases)]
    for case, stage, precision in cases:
        run = tmp_path / f"{case}-{stage}-{precision}"
        straight = losses(run / "straight")
        assert losses(run / "stopped") == straight, case
        steps = {row[0]: row[1] for row in straight if len(row) == 3}
        assert steps[STEPS] < steps[1], case
        alone = {row[0]: row[1] for row in losses(run / "alone") if len(row) == 3}
        assert max(alone) == STEPS and STOPPED_AT < min(alone) <= STOPPED_AT + 2
        for step, loss in alone.items():
            assert abs(loss - steps[step]) < TOLERANCE[precision] * loss, (case, step)
