"""Damaged checkpoints and runs that diverge, with the engine: what goes on, and what is left."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cat_lm.training.checkpoint import complete_checkpoints
from cat_lm.training.engine import StepResult
from tests.checkpoints import flip
from tests.distributed.ranks import run_on_ranks
from tests.distributed.trainers import error_of
from tests.runs import losses, run_values

# A file of each rank's share, in the order of their sizes.
FLIPPED = ("model/model.safetensors", "random-00001.pt")
POISONED = ((0, "weights"), (1, "exp_avg"), (1, "exp_avg_sq"))


def values_of(data: str, run: Path, keep_last: int = 2, every: int = 2, **train_keys) -> dict:
    values = run_values(data, run, **{"max_steps": 4, "zero_stage": 1, **train_keys})
    values["checkpoint"] = {"every_steps": every, "keep_last": keep_last}
    return values


def continued(ranks, data: str, folder: str) -> list[str]:
    """Damage the newer of two checkpoints and go on; return what the watchdog heard of a save."""
    first, heard = Path(folder) / "first", []
    error_of(
        ranks,
        values_of(data, first),
        prepare=lambda trainer: setattr(trainer.checkpoints, "_progress", heard.append),
    )
    for name in FLIPPED:
        run = Path(folder) / name.replace("/", "-")

        def prepare(run=run, name=name):
            shutil.copytree(first, run)
            flip(run / "checkpoints/step-00000004" / name)

        ranks.on_rank_zero(prepare)
        assert error_of(ranks, values_of(data, run, resume="auto")) == "finished"
    return heard


def test_flipped_bit_found_by_any_rank_resumes_from_an_older_checkpoint(tiny_corpus, tmp_path):
    heard = run_on_ranks(continued, 2, str(tiny_corpus), str(tmp_path))
    for rank, file in enumerate(("model/model.safetensors", "state/rank-00001.safetensors")):
        assert f"writing {file}" in heard[rank]
    for name in FLIPPED:
        run = tmp_path / name.replace("/", "-")
        log = (run / "train.log").read_text()
        (line,) = [line for line in log.splitlines() if "passed over" in line]
        assert line.endswith(f"{name}: its checksum differs from the one in complete.json")
        assert "step-00000002\n" in log and "continuing from" in log
        assert losses(run) == losses(tmp_path / "first")
        left = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
        assert left == ["step-00000002", "step-00000004", "step-00000004.aside"]
        assert "step-00000004: not whole, and later than step-00000002; set aside as" in log


def poisoned(step: int, kind: str):
    """Make one weight or moment infinite after the `step`-th step, as divergence does."""

    def prepare(trainer) -> None:
        original = trainer.engine.launch_step

        def launch_step(*given):
            result = original(*given)
            if trainer.step == step and trainer.ranks.is_first:
                optimizer = trainer.engine.optimizer
                state = next(iter(optimizer.state.values()))
                weights = optimizer.param_groups[0]["params"][0].data
                chosen = weights if kind == "weights" else state[kind]
                chosen.view(-1)[3] = torch.inf if kind == "weights" else torch.nan
            return result

        trainer.engine.launch_step = launch_step

    return prepare


def skipping(skipped: list[int]):
    """Have the engine say of these steps that they were skipped, and train none of them."""

    def prepare(trainer) -> None:
        original = trainer.engine.launch_step

        def launch_step(batch, lr, votes):
            if trainer.step in skipped:
                result = StepResult(float("nan"), float("nan"), True, votes)
                return SimpleNamespace(result=lambda: result, seconds=lambda after: 1.0)
            return original(batch, lr, votes)

        trainer.engine.launch_step = launch_step

    return prepare


def diverging(ranks, data: str, folder: str) -> dict[str, str]:
    found = {}
    for stage, kind in POISONED:
        values = values_of(data, Path(folder) / kind, 1, max_steps=8, zero_stage=stage)
        found[kind] = error_of(ranks, values, prepare=poisoned(4, kind))
    skips = {"all": range(3, 9), "last": [8], "some": [3, 4, 5, 6], "scattered": [2, 3, 5, 6, 7]}
    for name, skipped in skips.items():
        values = values_of(data, Path(folder) / name, 1, 1, max_steps=8, max_skipped_steps=5)
        found[name] = error_of(ranks, values, prepare=skipping(skipped))
    values["train"] |= {"output_dir": str(Path(folder) / "last"), "resume": "auto"}
    found["last again"] = error_of(ranks, values)
    return found


def steps(run: Path) -> list[int]:
    return [int(path.name[5:]) for path in complete_checkpoints(run / "checkpoints")]


@pytest.fixture(scope="module")
def diverged(tiny_corpus, tmp_path_factory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("diverged")
    one, two = run_on_ranks(diverging, 2, str(tiny_corpus), str(folder))
    assert one == two
    return folder, one


@pytest.mark.parametrize(("stage", "kind"), POISONED)
def test_state_that_is_not_finite_is_never_saved(diverged, stage, kind):
    folder, found = diverged
    # The poisoned step's own save, or that of a later one which the poison has spread to.
    assert f"{kind} of " in found[kind]
    assert "not finite; no checkpoint is made of it" in found[kind]
    assert "newest complete one: step-00000002, of 1 in " in found[kind]
    assert steps(folder / kind) == [2]


def test_skipped_steps_prune_nothing(diverged):
    folder, found = diverged
    assert "5 steps in a row were not finite (train.max_skipped_steps)" in found["all"]
    assert "newest complete one: step-00000002, of 1 in" in found["all"]
    assert steps(folder / "all") == [2]
    assert found["some"] == "finished" and steps(folder / "some") == [8]
    assert found["scattered"] == "finished", "only steps in a row end a run"


def test_run_that_ends_with_a_skipped_step_is_not_finished(diverged):
    folder, found = diverged
    for line in (found["last"], found["last again"]):
        assert line.startswith("step 8, the last one, was skipped (1 in a row): ")
        assert "the run is not finished; newest complete one: step-00000008, of 2 in" in line
    assert "finished:" not in (folder / "last/train.log").read_text()
    assert steps(folder / "last") == [7, 8]  # saved, and nothing pruned
