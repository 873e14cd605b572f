"""Interrupted twice and continued: the straight run's losses, bit for bit (R16, R35)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from cat_lm.core.errors import REQUEUE_EXIT_CODE, UserError
from cat_lm.training.checkpoint import complete_checkpoints, find_checkpoint, is_complete
from tests.checkpoints import seal
from tests.distributed.ranks import run_on_ranks
from tests.distributed.trainers import opened
from tests.runs import losses, records, run_values

STEPS = 8
# Stages and precisions: two ranks train with all of them, with SHORT in the short tier; one rank
# with every stage and every precision.
TWO = ((0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "fp32"))
SHORT = TWO[2:]
ONE = ((0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16"))
LAS = {
    "score_transform": "exponential_decay",
    "score_options": {"spacing": "steep", "bound": 0.3},
    "value_transform": "smoothing",
    "value_options": {"width": 3},
}


def train(ranks, values: dict, signals: dict[int, signal.Signals] | None = None) -> int:
    """Runs train.py's Trainer; after step s, only the last rank gets the signal `signals[s]`."""
    from train import Trainer

    class Signalled(Trainer):
        def train_step(self, batch, waited):
            super().train_step(batch, waited)
            number = (signals or {}).get(self.step)
            if number and ranks.rank == ranks.world_size - 1:
                os.kill(os.getpid(), number)

    with opened(Signalled, ranks, values) as trainer:
        return trainer.run()


def straight_and_interrupted(ranks, data: str, folder: str, settings: tuple):
    results = []
    for stage, precision in settings:
        name = f"{stage}-{precision}"
        values = {
            kind: run_values(
                data,
                Path(folder) / kind / name,
                zero_stage=stage,
                precision=precision,
                max_steps=STEPS,
            )
            for kind in ("straight", "interrupted")
        }
        for one in values.values():
            one["train"]["deterministic"] = stage == 2
            if stage == 3:  # with LaS attention too, on packed documents
                one["model"] |= LAS
                one["data"]["mask_documents"] = True
            one["validation"]["every_steps"] = STEPS // 2
        codes = [train(ranks, values["straight"])]
        values["interrupted"]["train"]["resume"] = "auto"
        for signals in ({3: signal.SIGTERM}, {6: signal.SIGUSR1}, {}):
            codes.append(train(ranks, values["interrupted"], signals))
        results.append(codes)
    return results


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (2, SHORT),
        pytest.param(2, [each for each in TWO if each not in SHORT], marks=pytest.mark.long),
        pytest.param(1, ONE, marks=pytest.mark.long),
        pytest.param(2, ONE, marks=pytest.mark.long),
    ],
)
def test_interrupted_twice_equals_straight(world_size, settings, tiny_corpus, tmp_path):
    folders = (str(tiny_corpus), str(tmp_path))
    results = run_on_ranks(straight_and_interrupted, world_size, *folders, settings)
    for codes_of_rank in results:
        for codes in codes_of_rank:
            assert codes == [0, REQUEUE_EXIT_CODE, REQUEUE_EXIT_CODE, 0]
    for stage, precision in settings:
        name = f"{stage}-{precision}"
        straight = losses(tmp_path / "straight" / name)
        assert [row[0] for row in straight if len(row) == 3] == list(range(1, STEPS + 1))
        assert losses(tmp_path / "interrupted" / name) == straight, name


def stopped_by_validations(ranks, data: str, folder: str) -> list[tuple[int, int, list[int], int]]:
    """(exit code, last step, steps that were validated, validations begun) of each start."""
    from cat_lm.training import validation
    from train import Trainer

    validation.ASKED_EVERY = 2
    values = run_values(data, Path(folder) / "run", max_steps=6, resume="auto")
    values["validation"] |= {"every_steps": 3, "max_tokens": 32 * 4 * ranks.world_size * 4}

    class Told(Trainer):
        signals: frozenset = frozenset()
        begun = 0

        def validate(self):
            self.begun += 1
            return super().validate()

        def train_step(self, batch, waited):
            super().train_step(batch, waited)
            if (self.step, "before") in self.signals:
                self.tell()

        def must_stop(self):
            if (self.step, "within") in self.signals:
                self.tell()
            return super().must_stop()

        def tell(self):
            if ranks.rank == ranks.world_size - 1:
                os.kill(os.getpid(), signal.SIGTERM)

    found = []
    for when in ([(2, "before")], [(3, "within")], [(6, "within")], []):
        Told.signals = frozenset(when)
        with opened(Told, ranks, values) as trainer:
            code, last = trainer.run(), trainer.step
        rows = records(Path(folder) / "run")
        validated = [row["step"] for row in rows if "val_loss" in row]
        found.append((code, last, validated, trainer.begun))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_stop_waits_for_no_validation_and_the_next_start_makes_up_for_it(
    world_size, tiny_corpus, tmp_path
):
    """One rank stops after step 2, two after step 3, where a validation is due."""
    folders = (str(tiny_corpus), str(tmp_path))
    found = run_on_ranks(stopped_by_validations, world_size, *folders)[0]
    stopped = REQUEUE_EXIT_CODE
    assert found == [
        (stopped, 1 + world_size, [], 0),
        (stopped, 3, [], 1),
        (stopped, 6, [3], 2),
        (0, 6, [3, 6], 1),
    ]
    saved = complete_checkpoints(tmp_path / "run/checkpoints")
    assert saved[-1].name == "step-00000006"


def refused(ranks, data: str, folder: str):
    """Messages of runs that must not go on from the checkpoints of `folder`."""
    run = Path(folder) / "run"
    train(ranks, run_values(data, run))
    values = run_values(data, run)
    messages = []
    for section, key, value in (
        ("train", "resume", "never"),
        ("train", "seed", 5),
        ("model", "conv_window", 3),
        ("data", "mask_documents", True),
        ("train", "resume", str(run / "checkpoints/step-00000005-gone")),
    ):
        changed = {name: dict(content) for name, content in values.items()}
        changed["train"]["resume"] = "auto"
        changed[section][key] = value
        try:
            train(ranks, changed)
            messages.append("")
        except UserError as error:
            messages.append(str(error))
    return messages


def test_a_run_that_would_be_another_one_is_refused(tiny_corpus, tmp_path):
    never, seed, window, masked, gone = run_on_ranks(refused, 1, str(tiny_corpus), str(tmp_path))[0]
    assert "already holds step-00000012" in never
    assert "another train.seed" in seed and "another model.conv_window" in window
    assert "another data.mask_documents" in masked
    assert "no such checkpoint" in gone


def test_other_data_are_refused(tiny_corpus, tmp_path):
    run_on_ranks(train, 2, run_values(tiny_corpus, tmp_path / "run"))
    checkpoint = find_checkpoint(tmp_path / "run")
    state = checkpoint / "state.json"
    changed = state.read_text().replace('"fingerprint": "', '"fingerprint": "0')
    state.write_text(changed)
    seal(checkpoint)
    message = run_on_ranks(error_of, 2, run_values(tiny_corpus, tmp_path / "run", resume="auto"))
    assert "trained on other data" in message[0]


def error_of(ranks, values: dict) -> str:
    try:
        train(ranks, values)
    except UserError as error:
        return str(error)
    return ""


def test_validation_with_more_ranks_than_windows(tiny_corpus, tmp_path):
    """One held-out window: the second rank has none, and the number is still that of one rank."""
    found = []
    for world_size in (1, 2):
        run = tmp_path / str(world_size)
        values = run_values(tiny_corpus, run, max_steps=3, micro_batch_size=4)
        values["model"]["hidden_dropout"] = 0.0
        values["validation"] = {"every_steps": 3, "max_tokens": 32}
        run_on_ranks(train, world_size, values)
        found.append([row[1] for row in losses(run) if len(row) == 2])
    assert len(found[0]) == 1 and found[0] == pytest.approx(found[1], rel=1e-5)


def test_kept_and_incomplete_checkpoints(tiny_corpus, tmp_path):
    """Old ones are pruned, damaged ones are passed over, the newest complete one is found."""
    values = run_values(tiny_corpus, tmp_path / "run", max_steps=20)
    values["checkpoint"] = {"every_steps": 3, "keep_last": 2, "keep_every_steps": 6}
    run_on_ranks(train, 1, values)
    folder = tmp_path / "run/checkpoints"
    names = [path.name for path in complete_checkpoints(folder)]
    assert names == [f"step-{step:08d}" for step in (6, 12, 18, 20)]
    assert sorted(p.name for p in folder.iterdir()) == sorted([".lock", "latest", *names])
    assert (folder / "latest").read_text().strip() == names[-1]

    newest = folder / names[-1]
    weights = newest / "model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert not is_complete(newest)
    assert find_checkpoint(tmp_path / "run").name == names[-2]
    with pytest.raises(UserError, match="not a complete checkpoint"):
        find_checkpoint(newest)
    (folder / names[-2] / "complete.json").unlink()
    assert find_checkpoint(folder).name == names[-3]
    with pytest.raises(UserError, match="no such"):
        find_checkpoint(tmp_path / "nothing")
    with pytest.raises(UserError, match="no complete checkpoint"):
        find_checkpoint(tmp_path)
