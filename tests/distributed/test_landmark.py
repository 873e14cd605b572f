"""Landmark attention that is taught: every ZeRO stage trains alike, and runs resume exactly."""

from __future__ import annotations

import shutil
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
from tests.distributed.trainers import TERM, error_of, train
from tests.runs import losses, records, run_values

LANDMARK = {
    "attention": "landmark",
    "attention_options": {"block": 3, "top_k": 2, "local": 1, "filter": "learned"},
}


def calibrated(ranks, cases: tuple) -> list[tuple]:
    """Losses and weights by stage; every query teaches, so that nothing is drawn."""
    found = []
    for stage, checkpoints, precision in cases:
        values = make_config(stage, 2, precision, MODEL | LANDMARK).model_dump()
        values["train"] |= {"landmark_loss": "calibrate", "landmark_rows": 24}
        values["train"]["init_from"] = "unread"
        values["train"]["activation_checkpointing"] = checkpoints
        values["optimizer"]["weight_decay"] = 0.0
        config = RunConfig.model_validate(values)
        model = build_model(config, VOCAB, weights=True)
        before = {name: w.detach().clone() for name, w in model.named_parameters()}
        engine = Engine(model, config, ranks)
        steps = [engine.train_step(rows_of(global_batch(s), ranks), 1e-2) for s in range(3)]
        kept = full_precision_weights(engine)
        moved = {name for name, w in kept.items() if not torch.equal(w, before[name])}
        numbers = [(s.loss, s.auxiliary, s.grad_norm) for s in steps]
        found.append((numbers, kept, moved))
    return found


def test_calibration_moves_landmarks_only():
    """Not a bit of another weight, in any stage and precision: of what the model came with."""
    cases = ((0, False, "fp32"), (1, False, "bf16"), (2, True, "bf16"), (3, True, "fp32"))
    cases += ((3, False, "bf16"),)
    found = run_on_ranks(calibrated, 2, cases)[0]
    for case, (numbers, weights, moved) in zip(cases, found, strict=True):
        cores = {name for name in weights if ".core." in name}
        assert moved == cores and len(cores) == 4, case
        for (loss, auxiliary, norm), (wanted, own, _) in zip(numbers, found[0][0], strict=True):
            close = {"rtol": 1e-4, "atol": 1e-6} if "fp32" in case else {"rtol": 0.05, "atol": 1e-3}
            torch.testing.assert_close((loss, auxiliary), (wanted, own), **close)
            assert 0 < norm < 1


def taught(data: str, folder: str, name: str, way: str) -> dict:
    """Return the values of a run that is taught, and goes on where it is."""
    values = run_values(data, Path(folder) / name, zero_stage=3, resume="auto", max_steps=4)
    values["model"] |= LANDMARK
    values["data"]["mask_documents"] = True
    values["train"] |= {"landmark_loss": way, "landmark_rows": 5, "activation_checkpointing": True}
    if way == "calibrate":
        values["train"]["init_from"] = str(Path(folder) / "dense")
        values["optimizer"]["weight_decay"] = 0.0
    return values


def straight_and_stopped(ranks, data: str, folder: str, way: str) -> tuple[list[int], str]:
    """Return the exit codes, and the error where the stopped run shall be taught otherwise."""
    codes = [train(ranks, taught(data, folder, "straight", way))]
    codes += [train(ranks, taught(data, folder, "stopped", way), s) for s in ({2: TERM}, {})]
    other = "guided" if way == "calibrate" else "calibrate"
    return codes, error_of(ranks, taught(data, folder, "stopped", other))


@pytest.mark.parametrize("way", ["guided", pytest.param("calibrate", marks=pytest.mark.long)])
def test_taught_run_resumes_exactly(way, tiny_corpus, tmp_path):
    """Which queries teach is drawn: the generators' states are part of a checkpoint."""
    config = RunConfig.model_validate(run_values(tiny_corpus, tmp_path))
    dense = build_model(config, open_corpus(tiny_corpus, "train").vocab_size)
    dense.save_pretrained(tmp_path / "dense")
    shutil.copytree(tiny_corpus / "tokenizer", tmp_path / "dense", dirs_exist_ok=True)
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
