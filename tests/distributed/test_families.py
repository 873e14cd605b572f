"""Every family trains on several ranks, is interrupted and goes on, exactly and elsewhere.

The models are those of `tests/cat_lm/architectures/test_families.py`. Dropout, other saves and
all changes of ranks and stages are tested with one family, in test_resume.py and test_elastic.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cat_lm import architectures
from cat_lm.core.errors import REQUEUE_EXIT_CODE, UserError
from tests.cat_lm.architectures.test_families import CASES, SHARED
from tests.distributed.ranks import run_on_ranks
from tests.distributed.trainers import TERM, opened, train
from tests.runs import losses, run_values

# Two ranks are stopped at the first step, and one rank that goes on from there at the second.
STEPS, STOPPED_AT, ALONE_UNTIL = 7, 3, 6
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}  # of losses that other ranks sum up in another order


class Run(NamedTuple):
    """A case of a family, and the ZeRO stages on two ranks, on one, and on two again."""

    case: str
    stage: int
    alone: int
    back: int
    precision: str

    @property
    def name(self) -> str:
        return f"{self.case}-{self.stage}"


def runs_of(number: int, case: str) -> list[Run]:
    """From stage 3 and from another, which goes round from case to case; of two ranks every stage.

    Stage 3 alone takes parameters from the modules: each run goes over to it or from it, or between
    two of the others.
    """
    whole, other, last = ((number + shift) % 3 for shift in range(3))
    precision = "bf16" if whole == 0 else "fp32"
    return [Run(case, 3, 0, other, "bf16"), Run(case, whole, 3 - whole, last, precision)]


RUNS = [run for number, case in enumerate(CASES) for run in runs_of(number, case)]
# Of two families, which begin with and without partitioned parameters; then one run of each case.
SHORT = [run for run in RUNS if (run.case, run.stage == 3) in (("mamba2", True), ("gla", False))]
ONE = [RUNS[2 * number + number % 2] for number in range(len(CASES))]


def values_of(data: str, folder: Path, run: Run, stage: int, **train_keys: Any) -> dict:
    how = {"zero_stage": stage, "precision": run.precision, "max_steps": STEPS}
    values = run_values(data, folder, **how, **train_keys)
    family = run.case.partition(":")[0]
    values["model"] = {"architecture": family, **SHARED, **CASES[run.case]}
    values["data"]["mask_documents"] = True
    values["validation"] = {"every_steps": STEPS, "max_tokens": 256}
    values["checkpoint"] = {"every_steps": STEPS}
    return values


def on_two_ranks(ranks, data: str, folder: str, runs: list[Run]) -> list[list[int]]:
    """Train straight, and stopped and gone on."""
    codes = []
    for run in runs:
        own = Path(folder) / run.name
        found = [train(ranks, values_of(data, own / "straight", run, run.stage))]
        values = values_of(data, own / "stopped", run, run.stage, resume="auto")
        codes.append([*found, train(ranks, values, {STOPPED_AT: TERM}), train(ranks, values)])
    return codes


def on_other_ranks(
    ranks, data: str, folder: str, runs: list[Run], start: str, to: str, signals: dict
) -> list[int]:
    """Go on in the folder `to`, with its stage, from where the run in `start` was stopped."""
    codes = []
    for run in runs:
        own = Path(folder) / run.name
        first = min((own / start / "checkpoints").glob("step-*[0-9]"))
        values = values_of(data, own / to, run, getattr(run, to), resume=str(first))
        codes.append(train(ranks, values, signals))
    return codes


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param(SHORT, id="two families"),
        pytest.param([r for r in ONE if r not in SHORT], id="all", marks=pytest.mark.long),
        pytest.param([r for r in RUNS if r not in ONE], id="both", marks=pytest.mark.nightly),
    ],
)
def test_family_is_stopped_and_goes_on(runs, tiny_corpus, tmp_path):
    given, stopped = (str(tiny_corpus), str(tmp_path), runs), REQUEUE_EXIT_CODE
    assert run_on_ranks(on_two_ranks, 2, *given) == [[[0, stopped, 0]] * len(runs)] * 2
    alone = run_on_ranks(on_other_ranks, 1, *given, "stopped", "alone", {ALONE_UNTIL: TERM})
    assert alone == [[stopped] * len(runs)]
    assert run_on_ranks(on_other_ranks, 2, *given, "alone", "back", {}) == [[0] * len(runs)] * 2
    for run in runs:
        own = tmp_path / run.name
        family = architectures.get(run.case.partition(":")[0])
        said = "recurrence: " in (own / "straight/train.log").read_text(encoding="utf-8")
        assert said == family.recurrent, run
        straight = losses(own / "straight")
        assert losses(own / "stopped") == straight, run
        steps = {row[0]: row[1] for row in straight if len(row) == 3}
        assert steps[STEPS] < steps[1], run
        alone, back = (
            {row[0]: row[1] for row in losses(own / name) if len(row) == 3}
            for name in ("alone", "back")
        )
        assert max(alone) == ALONE_UNTIL and STOPPED_AT < min(alone) <= STOPPED_AT + 2
        assert list(back) == [STEPS]
        for step, loss in (alone | back).items():
            assert abs(loss - steps[step]) < TOLERANCE[run.precision] * loss, (run, step)


def begun(ranks, values: dict) -> str:
    from train import Trainer

    try:
        with opened(Trainer, ranks, values):
            return "begun"
    except UserError as error:
        return str(error)


@pytest.mark.parametrize(
    ("backend", "said"),
    [("fla", "train.mixer_backend=fla: backend='fla' cannot serve"), ("torch", "begun")],
)
def test_backend_that_cannot_serve_ends_the_run_at_its_start(backend, said, tiny_corpus, tmp_path):
    run = Run("gla", 0, 0, 0, "fp32")
    values = values_of(str(tiny_corpus), tmp_path / "run", run, 0, mixer_backend=backend)
    (found,) = run_on_ranks(begun, 1, values)
    assert found.startswith(said)
    if backend == "torch":
        log = (tmp_path / "run/train.log").read_text(encoding="utf-8")
        assert "recurrence: gated linear attention: torch, asked for by name" in log
