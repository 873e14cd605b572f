"""Landmark attention that is taught: every ZeRO stage trains alike, and runs resume exactly."""

from __future__ import annotations

import signal
from pathlib import Path

import torch

from cat_lm.training.engine import Engine, build_model
from cat_lm.training.optimizer_state import full_precision_weights
from cat_lm.training.stop import REQUEUE_EXIT_CODE
from tests.distributed.ranks import run_on_ranks
from tests.distributed.test_engine import MODEL, VOCAB, global_batch, make_config, rows_of
from tests.distributed.test_resume import train
from tests.runs import losses, records, run_values

LANDMARK = {
    "attention": "landmark",
    "attention_options": {"block": 3, "top_k": 2, "local": 1, "filter": "learned"},
}


def guided_steps(ranks) -> list[tuple]:
    """Losses and weights by stage; every query teaches, so that nothing is drawn."""
    found = []
    for stage, checkpoints in ((0, False), (3, True)):
        config = make_config(stage, 2, "fp32", MODEL | LANDMARK)
        changes = {"landmark_loss": "guided", "landmark_rows": 24, "landmark_weight": 0.5}
        changes["activation_checkpointing"] = checkpoints
        config = config.model_copy(update={"train": config.train.model_copy(update=changes)})
        engine = Engine(build_model(config, VOCAB, weights=True), config, ranks)
        before = {name: w.clone() for name, w in full_precision_weights(engine).items()}
        steps = [engine.train_step(rows_of(global_batch(s), ranks), 1e-2) for s in range(3)]
        kept = full_precision_weights(engine)
        moved = {name for name, w in kept.items() if not torch.equal(w, before[name])}
        numbers = [(s.loss, s.auxiliary, s.grad_norm) for s in steps]
        found.append((numbers, {name: w.numpy() for name, w in kept.items()}, moved))
    return found


def test_stages_train_alike():
    of_ranks = run_on_ranks(guided_steps, 2)
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


def straight_and_stopped(ranks, data: str, folder: str) -> list[int]:
    codes = []
    for name, signals in (("straight", [{}]), ("stopped", [{2: signal.SIGTERM}, {}])):
        values = run_values(data, Path(folder) / name, zero_stage=3, resume="auto")
        values["model"] |= LANDMARK
        values["data"]["mask_documents"] = True
        values["train"] |= {"landmark_loss": "guided", "landmark_rows": 5}
        values["train"] |= {"activation_checkpointing": True, "max_steps": 4}
        codes += [train(ranks, values, given) for given in signals]
    return codes


def test_a_guided_run_resumes_exactly(tiny_corpus, tmp_path):
    """Which queries teach is drawn: the generators' states are part of a checkpoint."""
    results = run_on_ranks(straight_and_stopped, 2, str(tiny_corpus), str(tmp_path))
    assert results == [[0, REQUEUE_EXIT_CODE, 0]] * 2
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert losses(stopped) == losses(straight)
    own = [[r.get("landmark_loss") for r in records(run)] for run in (stopped, straight)]
    assert own[0] == own[1] and sum(loss is not None for loss in own[0]) == 4
