"""Interrupted twice and continued: the straight run's losses, bit for bit (R16, R35)."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from cat_lm.core.errors import REQUEUE_EXIT_CODE, UserError
from cat_lm.training.checkpoint import complete_checkpoints, find_checkpoint, is_complete
from tests.checkpoints import seal
from tests.distributed.ranks import run_on_ranks
from tests.distributed.trainers import TERM, after, error_of, opened, train
from tests.runs import losses, records, run_values

STEPS = 8
LAS = {
    "score_transform": "exponential_decay",
    "score_options": {"spacing": "steep", "bound": 0.3},
    "value_transform": "smoothing",
    "value_options": {"width": 3},
}
# Ranks, and stages with precisions. Two ranks train with every stage and precision in CI.
SETTINGS = [
    (2, [(1, "bf16"), (3, "fp32")]),
    pytest.param(2, [(0, "bf16"), (1, "fp32"), (2, "bf16")], marks=pytest.mark.long),
    pytest.param(1, [(0, "fp32"), (1, "bf16"), (3, "bf16")], marks=pytest.mark.nightly),
    pytest.param(2, [(0, "fp32"), (3, "bf16")], marks=pytest.mark.nightly),
]


def straight_and_interrupted(ranks, data: str, folder: str, settings: list) -> list[list[int]]:
    results = []
    for stage, precision in settings:
        codes = []
        for kind, every in (
            ("straight", [{}]),
            ("interrupted", [{3: TERM}, {6: signal.SIGUSR1}, {}]),
        ):
            run = Path(folder) / kind / f"{stage}-{precision}"
            how = {"zero_stage": stage, "precision": precision, "max_steps": STEPS}
            values = run_values(data, run, resume="auto", deterministic=stage == 2, **how)
            if stage == 3:  # with LaS attention too, on packed documents
                values["model"] |= LAS
                values["data"]["mask_documents"] = True
            values["validation"]["every_steps"] = STEPS // 2
            codes += [train(ranks, values, signals) for signals in every]
        results.append(codes)
    return results


@pytest.mark.parametrize(("world_size", "settings"), SETTINGS)
def test_run_interrupted_twice_equals_the_straight_one(world_size, settings, tiny_corpus, tmp_path):
    folders = (str(tiny_corpus), str(tmp_path))
    expected = [[0, REQUEUE_EXIT_CODE, REQUEUE_EXIT_CODE, 0]] * len(settings)
    results = run_on_ranks(straight_and_interrupted, world_size, *folders, settings)
    assert results == [expected] * world_size
    for stage, precision in settings:
        name = f"{stage}-{precision}"
        straight = losses(tmp_path / "straight" / name)
        assert [row[0] for row in straight if len(row) == 3] == list(range(1, STEPS + 1))
        assert losses(tmp_path / "interrupted" / name) == straight, name


def stopped_by_validations(ranks, data: str, folder: str) -> list[tuple[int, int, list[int], int]]:
    """(exit code, last step, steps that were validated, validations begun) of each launch."""
    from cat_lm.training import validation
    from train import Trainer

    validation.ASKED_EVERY = 2
    values = run_values(data, Path(folder) / "run", max_steps=6, resume="auto")
    values["validation"] |= {"every_steps": 3, "max_tokens": 32 * 4 * ranks.world_size * 4}

    class Told(Trainer):
        within = 0

        def must_stop(self):
            if self.step == self.within and ranks.rank == ranks.world_size - 1:
                os.kill(os.getpid(), TERM)
            return super().must_stop()

    found = []
    for before, within in ((2, 0), (0, 3), (0, 6), (0, 0)):
        begun, Told.within = [], within
        with opened(Told, ranks, values) as trainer:

            def tell(trainer=trainer, before=before):
                if trainer.step == before and ranks.rank == ranks.world_size - 1:
                    os.kill(os.getpid(), TERM)

            after(trainer, "train_step", tell)
            after(trainer, "validate", lambda begun=begun: begun.append(1))
            code, last = trainer.run(), trainer.step
        rows = records(Path(folder) / "run")
        found.append((code, last, [r["step"] for r in rows if "val_loss" in r], len(begun)))
    return found


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_stop_waits_for_no_validation_and_the_next_launch_makes_it(
    world_size, tiny_corpus, tmp_path
):
    """One rank stops after step 2, two after step 3, where a validation is due."""
    found = run_on_ranks(stopped_by_validations, world_size, str(tiny_corpus), str(tmp_path))[0]
    stopped = REQUEUE_EXIT_CODE
    assert found == [
        (stopped, 1 + world_size, [], 0),
        (stopped, 3, [], 1),
        (stopped, 6, [3], 2),
        (0, 6, [3, 6], 1),
    ]
    saved = complete_checkpoints(tmp_path / "run/checkpoints")
    assert saved[-1].name == "step-00000006"


# What is changed in a run that goes on, and what is then said.
CHANGES = (
    ("train", "seed", 5, "another train.seed"),
    ("model", "conv_window", 3, "another model.conv_window"),
    ("data", "mask_documents", True, "another data.mask_documents"),
    ("train", "resume", "never", "already holds step-00000003"),
    ("train", "resume", "gone", "no such checkpoint"),
    ("data", "path", None, "trained on other data"),
)


def refused(ranks, data: str, folder: str) -> list[str]:
    """Messages of runs that must not go on from the checkpoints of a folder."""
    run = Path(folder) / "run"
    train(ranks, run_values(data, run, max_steps=3))
    messages = []
    for section, key, value, _ in CHANGES:
        values = run_values(data, run, resume="auto", max_steps=3)
        if key == "path":

            def spoil():
                state = find_checkpoint(run) / "state.json"
                other = re.sub('(?<="fingerprint": ").', "x", state.read_text())
                state.write_text(other)
                seal(state.parent)

            ranks.on_rank_zero(spoil)
        else:
            values[section][key] = value
        messages.append(error_of(ranks, values))
    return messages


def test_run_that_would_be_another_one_is_refused(tiny_corpus, tmp_path):
    first, second = run_on_ranks(refused, 2, str(tiny_corpus), str(tmp_path))
    assert first == second
    for message, (*_, said) in zip(first, CHANGES, strict=True):
        assert said in message


def test_validation_of_windows_that_do_not_divide_is_that_of_one_rank(tiny_corpus, tmp_path):
    """Three windows are four places on two ranks: the last one is scored once."""
    found = []
    for world_size in (1, 2):
        run = tmp_path / str(world_size)
        values = run_values(tiny_corpus, run, max_steps=3, micro_batch_size=world_size)
        values["model"]["hidden_dropout"] = 0.0
        values["validation"] = {"every_steps": 3, "max_tokens": 3 * 32}
        run_on_ranks(train, world_size, values)
        found.append([row[1] for row in losses(run) if len(row) == 2])
    assert len(found[0]) == 1 and found[0] == pytest.approx(found[1], rel=1e-5)


def test_retention_rule_keeps_what_it_says(tiny_corpus, tmp_path):
    """Old ones are pruned, damaged ones are passed over, the newest complete one is found."""
    values = run_values(tiny_corpus, tmp_path / "run", max_steps=20)
    values["checkpoint"] = {"every_steps": 3, "keep_last": 2, "keep_every_steps": 6}
    run_on_ranks(train, 1, values)
    folder = tmp_path / "run/checkpoints"
    names = [path.name for path in complete_checkpoints(folder)]
    assert names == [f"step-{step:08d}" for step in (6, 12, 18, 20)]
    assert sorted(p.name for p in folder.iterdir()) == sorted([".lock", "latest", *names])
    assert (folder / "latest").read_text().strip() == names[-1]
    weights = folder / names[-1] / "model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert not is_complete(folder / names[-1])
    assert find_checkpoint(tmp_path / "run").name == names[-2]
    (folder / names[-2] / "complete.json").unlink()
    assert find_checkpoint(folder).name == names[-3]
    with pytest.raises(UserError, match="no complete checkpoint"):
        find_checkpoint(tmp_path)
