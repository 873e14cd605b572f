"""Damaged checkpoints and runs that diverge, with the engine: what goes on, and what is left."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from cat_lm.core.errors import UserError
from cat_lm.training.checkpoint import complete_checkpoints
from cat_lm.training.engine import StepResult
from tests.checkpoints import flip
from tests.distributed.ranks import run_on_ranks
from tests.distributed.trainers import opened
from tests.runs import losses, run_values

# Files of both ranks' shares, in the order of their sizes: each is looked at by another rank.
FLIPPED = (
    "model/model.safetensors",
    "state/rank-00000.safetensors",
    "state/rank-00001.safetensors",
    "random-00001.pt",
)


def train(ranks, values: dict, hook=None) -> str:
    """Runs train.py's Trainer; returns "finished", or the line that it ends with."""
    from train import Trainer

    try:
        with opened(Trainer, ranks, values) as trainer:
            if hook is not None:
                hook(trainer)
            assert trainer.run() == 0
    except UserError as error:
        return str(error)
    return "finished"


def values_of(data: str, run: Path, **train_keys) -> dict:
    values = run_values(data, run, **{"max_steps": 4, "zero_stage": 1, **train_keys})
    values["checkpoint"] = {"every_steps": 2, "keep_last": 2}
    return values


def continued(ranks, data: str, folder: str) -> None:
    """Two checkpoints, the newer one damaged."""
    first = Path(folder) / "first"
    train(ranks, values_of(data, first))
    for name in FLIPPED:
        run = Path(folder) / name.replace("/", "-")

        def prepare(run=run, name=name):
            shutil.copytree(first, run)
            flip(run / "checkpoints/step-00000004" / name)

        ranks.on_rank_zero(prepare)
        train(ranks, values_of(data, run, resume="auto"))


def test_flipped_bits_are_found_by_any_rank_and_an_older_one_goes_on(tiny_corpus, tmp_path):
    run_on_ranks(continued, 2, str(tiny_corpus), str(tmp_path))
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
    """Makes one weight or moment infinite after the `step`-th step, as divergence does."""

    def hook(trainer) -> None:
        original = trainer.engine.launch_step

        def launch_step(*given):
            result = original(*given)
            if trainer.step == step and trainer.ranks.is_first:
                (tensor, *_), (state, *_) = (
                    trainer.engine.optimizer.param_groups[0]["params"],
                    trainer.engine.optimizer.state.values(),
                )
                chosen = tensor.data if kind == "weights" else state[kind]
                chosen.view(-1)[3] = torch.inf if kind == "weights" else torch.nan
            return result

        trainer.engine.launch_step = launch_step

    return hook


def skipping(first: int, last: int):
    """The engine says of these steps that they were skipped; it has trained none of them."""

    def hook(trainer) -> None:
        original = trainer.engine.launch_step

        def launch_step(batch, lr, votes):
            if first <= trainer.step <= last:
                result = StepResult(float("nan"), float("nan"), True, votes)
                return SimpleNamespace(result=lambda: result, seconds=lambda after: 1.0)
            return original(batch, lr, votes)

        trainer.engine.launch_step = launch_step

    return hook


def diverging(ranks, data: str, folder: str) -> dict[str, str]:
    found = {}
    for stage in (0, 1):
        for kind in ("weights", "exp_avg", "exp_avg_sq"):
            name = f"{kind}-{stage}"
            values = values_of(data, Path(folder) / name, max_steps=8, zero_stage=stage)
            values["checkpoint"] = {"every_steps": 2, "keep_last": 1}
            found[name] = train(ranks, values, poisoned(4, kind))
    skips = {"all": (3, 99), "last": (8, 8), "some": (3, 6)}
    for name, (first, last) in skips.items():
        values = values_of(data, Path(folder) / name, max_steps=8, max_skipped_steps=5)
        values["checkpoint"] = {"every_steps": 1, "keep_last": 1}
        found[name] = train(ranks, values, skipping(first, last))
    values["train"] |= {"output_dir": str(Path(folder) / "last"), "resume": "auto"}
    found["last again"] = train(ranks, values)
    found["huge rate"] = train(ranks, huge_rate(data, Path(folder) / "huge"))
    return found


def huge_rate(data: str, run: Path) -> dict:
    values = values_of(data, run, max_steps=40, max_skipped_steps=20)
    values["optimizer"] |= {"lr": 1e3, "warmup_steps": 0, "grad_clip": 0, "schedule": "constant"}
    values["optimizer"]["weight_decay"] = 1e3  # a step multiplies the weights by -1e6
    values["checkpoint"] = {"every_steps": 1, "keep_last": 2}
    return values


def steps(run: Path) -> list[int]:
    return [int(path.name[5:]) for path in complete_checkpoints(run / "checkpoints")]


@pytest.fixture(scope="module")
def diverged(tiny_corpus, tmp_path_factory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("diverged")
    one, two = run_on_ranks(diverging, 2, str(tiny_corpus), str(folder))
    assert one == two
    return folder, one


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("kind", ["weights", "exp_avg", "exp_avg_sq"])
def test_what_is_not_finite_is_never_saved(diverged, kind, stage):
    folder, found = diverged
    line = found[f"{kind}-{stage}"]
    # The poisoned step's own save, or that of a later one which the poison has spread to.
    assert f"{kind} of " in line and "not finite; no checkpoint is made of it" in line
    assert "newest complete one: step-00000002, of 1 in " in line
    assert steps(folder / f"{kind}-{stage}") == [2]


def test_skipped_steps_prune_nothing_and_the_message_is_true(diverged):
    folder, found = diverged
    assert "5 steps in a row were not finite (train.max_skipped_steps)" in found["all"]
    assert "newest complete one: step-00000002, of 1 in" in found["all"]
    assert steps(folder / "all") == [2]
    assert found["some"] == "finished" and steps(folder / "some") == [8]


def test_a_run_that_ends_with_a_skipped_step_is_not_finished(diverged):
    folder, found = diverged
    for line in (found["last"], found["last again"]):
        assert line.startswith("step 8, the last one, was skipped (1 in a row): ")
        assert "the run is not finished; newest complete one: step-00000008, of 2 in" in line
    assert "finished:" not in (folder / "last/train.log").read_text()
    assert steps(folder / "last") == [7, 8]  # saved, and nothing pruned


def test_a_rate_that_ruins_the_weights_leaves_what_was_good(diverged):
    folder, found = diverged
    assert "newest complete one: " in found["huge rate"]
    for step in complete_checkpoints(folder / "huge/checkpoints"):
        for path in step.rglob("*.safetensors"):
            assert all(tensor.isfinite().all() for tensor in load_file(path).values())


def slow_save(ranks, data: str, folder: str) -> list[str]:
    """What the watchdog hears during a save."""
    heard: list[str] = []

    def hook(trainer) -> None:
        trainer.checkpoints._progress = heard.append

    train(ranks, values_of(data, Path(folder) / "run", max_steps=2), hook)
    return heard


def test_the_watchdog_hears_of_every_file(tiny_corpus, tmp_path):
    (heard,) = run_on_ranks(slow_save, 1, str(tiny_corpus), str(tmp_path))
    assert "writing model/model.safetensors" in heard
    assert "writing state/rank-00000.safetensors" in heard
