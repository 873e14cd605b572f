"""Landmark attention that is taught: every ZeRO stage trains alike, and runs resume exactly."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
import torch

from cat_lm.config import RunConfig
from cat_lm.core.errors import REQUEUE_EXIT_CODE
from cat_lm.data.opening import open_corpus
from cat_lm.training.building import build_model
from cat_lm.training.checkpoint.optimizer_state import full_precision_weights
from cat_lm.training.engine import Engine
from tests.distributed.ranks import run_on_ranks
from tests.distributed.test_engine import MODEL, VOCAB, global_batch, make_config, rows_of
from tests.distributed.trainers import error_of, train
from tests.runs import losses, records, run_values

LANDMARK = {
    "attention": "landmark",
    "attention_options": {"block": 3, "top_k": 2, "local": 1, "filter": "learned"},
}


def steps_of(ranks, way: str, cases: tuple) -> list[tuple]:
    """Losses and weights by stage; every query teaches, so that nothing is drawn."""
    found = []
    for stage, checkpoints, precision in cases:
        config = make_config(stage, 2, precision, MODEL | LANDMARK)
        changes = {"landmark_loss": way, "landmark_rows": 24}
        changes["activation_checkpointing"] = checkpoints
        if way == "calibrate":
            optimizer = config.optimizer.model_copy(update={"weight_decay": 0.0})
            config = config.model_copy(update={"optimizer": optimizer})
        config = config.model_copy(update={"train": config.train.model_copy(update=changes)})
        model = build_model(config, VOCAB, weights=True)
        before = {name: w.detach().clone() for name, w in model.named_parameters()}
        engine = Engine(model, config, ranks)
        steps = [engine.train_step(rows_of(global_batch(s), ranks), 1e-2) for s in range(3)]
        kept = full_precision_weights(engine)
        moved = {name for name, w in kept.items() if not torch.equal(w, before[name])}
        numbers = [(s.loss, s.auxiliary, s.grad_norm) for s in steps]
        found.append((numbers, {name: w.numpy() for name, w in kept.items()}, moved))
    return found


def test_stages_train_alike():
    cases = ((0, False, "fp32"), (3, True, "fp32"))
    of_ranks = run_on_ranks(steps_of, 2, "guided", cases)
    for (plain, _, _), (zero, _, _) in of_ranks:
        # A divergence of distributions over at most seven blocks, at the start nearly alike.
        assert all(0 < auxiliary < 0.5 for _, auxiliary, _ in plain)
        torch.testing.assert_close(zero, plain, rtol=1e-4, atol=1e-6)
    (_, weights, moved), (_, others, _) = of_ranks[0]  # the first rank has them
    assert sum(".core." in name for name in moved) == 4
    for name, weight in weights.items():
        torch.testing.assert_close(
            torch.from_numpy(others[name]), torch.from_numpy(weight), rtol=1e-3, atol=1e-4
        )


def test_calibration_moves_landmarks_alone():
    """Not a bit of another weight, in any stage and precision: of what the model came with."""
    cases = tuple((stage, stage == 3, "fp32") for stage in range(4))
    cases += tuple((stage, stage == 2, "bf16") for stage in (0, 1, 2, 3))
    found = run_on_ranks(steps_of, 2, "calibrate", cases)[0]
    for case, (numbers, weights, moved) in zip(cases, found, strict=True):
        cores = {name for name in weights if ".core." in name}
        assert moved == cores and len(cores) == 4, case
        for (loss, auxiliary, norm), (wanted, own, _) in zip(numbers, found[0][0], strict=True):
            close = {"rtol": 1e-4, "atol": 1e-6} if "fp32" in case else {"rtol": 0.05, "atol": 1e-3}
            torch.testing.assert_close((loss, auxiliary), (wanted, own), **close)
            assert 0 < norm < 1


def taught(data: str, folder: str, name: str, way: str) -> dict:
    """Give the values of a run that is taught, and goes on where it is."""
    values = run_values(data, Path(folder) / name, zero_stage=3, resume="auto")
    values["model"] |= LANDMARK
    values["data"]["mask_documents"] = True
    values["train"] |= {"landmark_loss": way, "landmark_rows": 5}
    if way == "calibrate":
        values["train"]["init_from"] = str(Path(folder) / "dense")
        values["optimizer"]["weight_decay"] = 0.0
    values["train"] |= {"activation_checkpointing": True, "max_steps": 4}
    return values


def straight_and_stopped(ranks, data: str, folder: str, way: str) -> tuple[list[int], str]:
    """Give the exit codes, and what is said where the stopped run shall be taught otherwise."""
    codes = []
    for name, signals in (("straight", [{}]), ("stopped", [{2: signal.SIGTERM}, {}])):
        values = taught(data, folder, name, way)
        codes += [train(ranks, values, given) for given in signals]
    other = "guided" if way == "calibrate" else "calibrate"
    return codes, error_of(ranks, taught(data, folder, "stopped", other))


def dense_model(corpus: Path, folder: Path) -> None:
    """Write the model that the runs' would be without landmarks."""
    config = RunConfig.model_validate(run_values(corpus, folder))
    vocabulary = open_corpus(corpus, "train").vocab_size
    build_model(config, vocabulary).save_pretrained(folder)
    shutil.copytree(corpus / "tokenizer", folder, dirs_exist_ok=True)


@pytest.mark.parametrize("way", ["guided", "calibrate"])
def test_a_taught_run_resumes_exactly(way, tiny_corpus, tmp_path):
    """Which queries teach is drawn: the generators' states are part of a checkpoint."""
    dense_model(tiny_corpus, tmp_path / "dense")
    results = run_on_ranks(straight_and_stopped, 2, str(tiny_corpus), str(tmp_path), way)
    for codes, said in results:
        assert codes == [0, REQUEUE_EXIT_CODE, 0]
        # Moments of weights that shall stay as they are would go on to move them.
        assert f"train.landmark_loss={way}, and is to go on with" in said
        assert "train.output_dir, and the model as train.init_from" in said and "\n" not in said
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert losses(stopped) == losses(straight)
    own = [[r.get("landmark_loss") for r in records(run)] for run in (stopped, straight)]
    assert own[0] == own[1] and sum(loss is not None for loss in own[0]) == 4
