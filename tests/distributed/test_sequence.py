"""Ranks that share sequences (`train.sequence_parallel`) compute what one rank computes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from cat_lm.config import RunConfig
from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.ops.runtime.documents import document_runs
from cat_lm.training.building import build_model
from cat_lm.training.engine import Engine, sequence_group
from tests.distributed.ranks import run_on_ranks
from tests.distributed.trainers import train
from tests.runs import losses, run_values

VOCAB, LENGTH, ROWS = 61, 24, 3
SIZES = {"hidden_size": 32, "num_hidden_layers": 2}
NEOX = SIZES | {"num_attention_heads": 4, "intermediate_size": 64}
LLAMA = NEOX | {"architecture": "llama", "num_attention_heads": 8, "num_key_value_heads": 4}
LINEAR = SIZES | {"num_heads": 4, "intermediate_size": 48}
# W − 1 = 5 tokens before a part of 6 (P = 4) or 12: a halo of nearly a whole part.
MULTIHEAD = {"conv_type": "multihead", "conv_window": 6}
SSM = {"conv_type": "head", "conv_filter": "ssm", "conv_state": 4}
CANON = {"canon": "ACD", "canon_window": 4, "canon_init": "uniform"}
CASES = {
    "pythia": NEOX,
    "cat": NEOX | {"conv_type": "head", "conv_window": 21, "qk_norm": "l2"},
    "mh_cat": NEOX | MULTIHEAD | {"qk_norm": "l2", "qk_norm_place": "before"},
    "ranks": NEOX | {"conv_type": "head", "conv_window": 5, "conv_rank": 2, "conv_streams": "qk"},
    "ssm, canon": NEOX | SSM | CANON,
    "llama, exponential": LLAMA
    | {"conv_type": "head", "conv_filter": "exponential", "conv_state": 2},
    "landmark": NEOX
    | {"conv_type": "head", "conv_window": 4, "attention": "landmark"}
    | {"attention_options": {"block": 4, "top_k": 1}},
    "llama": LLAMA
    | {"conv_type": "depthwise", "conv_window": 4, "conv_activation": "silu"}
    | {"attention_bias": True, "qk_norm": "l2", "conv_norm": "l1"},
    "llama, canon": LLAMA | CANON,
    "canon of one tap": NEOX | CANON | {"canon_window": 1},
    "las": LLAMA
    | {"score_transform": "exponential_decay", "value_transform": "smoothing"}
    | {"attention": "chunk", "attention_options": {"size": 8}},
    "gla": LINEAR | {"architecture": "gla", "use_short_conv": True},
    "gated_deltanet": LINEAR | {"architecture": "gated_deltanet", "head_dim": 8},
    "delta_net": LINEAR | {"architecture": "delta_net"},
    "mamba": SIZES | {"architecture": "mamba", "state_size": 4},
    "mamba2": SIZES | {"architecture": "mamba2", "state_size": 4, "head_dim": 8, "n_groups": 2},
}


def make_config(model: dict[str, Any], parts: int) -> RunConfig:
    values = run_values(Path("unused"), Path("unused"), sequence_parallel=parts)
    values["model"] = model
    values["data"] |= {"context_length": LENGTH, "mask_documents": True}
    return RunConfig.model_validate(values)


def make_model(model: dict[str, Any]) -> torch.nn.Module:
    """In fp64, with random filters, biases and scales: none that does nothing passes unseen."""
    made = build_model(make_config(model, 1), VOCAB).double()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith(("bias", "filter", "sharpness", "scale", "conv1d.weight")):
                parameter += 0.3 * torch.randn_like(parameter)
    return made


def batch() -> dict[str, torch.Tensor]:
    """Rows without a border, with borders inside parts, and with borders where parts meet."""
    ids, labels = torch.randint(0, VOCAB, (2, ROWS, LENGTH), generator=torch.manual_seed(0))
    labels[1, 3:9] = -100
    starts = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    starts[1, [2, 5, 13, 14, 20]] = 1
    starts[2, [6, 12, 13, 18]] = 1
    documents = document_runs(starts.cumsum(1))
    return {"input_ids": ids, "document_ids": documents, "shift_labels": labels}


def summed(model: torch.nn.Module, group: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The sum of the losses and its gradients, over all parts."""
    given = batch()
    model.set_sequence_group(group)
    model.zero_grad()
    if group is not None:
        given |= {name: group.slice_own(given[name], 1) for name in ("input_ids", "shift_labels")}
    loss = model(**given, num_items_in_batch=1, skip_logits=True).loss
    loss.backward()
    found = [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
    if group is not None:
        for tensor in found:
            torch.distributed.all_reduce(tensor, group=group.group)
    return found[0], found[1:]


def differences(ranks, cases: dict[str, dict]) -> dict[tuple[str, int], float]:
    """The largest difference to one rank's loss and gradients, over each one's size."""
    found = {}
    sizes = [parts for parts in (2, 4) if parts <= ranks.world_size]
    groups = {parts: sequence_group(make_config(NEOX, parts), ranks) for parts in sizes}
    for name, fields in cases.items():
        model = make_model(fields).train()
        loss, gradients = summed(model, None)
        assert all(gradient.any() for gradient in gradients), name
        for parts, group in groups.items():
            theirs, their_gradients = summed(model, group)
            apart = [abs(theirs - loss) / loss]
            for theirs, ours in zip(their_gradients, gradients, strict=True):
                apart.append((theirs - ours).abs().max() / ours.abs().max().clamp(min=1e-3))
            found[name, parts] = max(float(number) for number in apart)
    return found


# A convolution by heads, one that mixes them, filters as long as the text, shared keys with Canon
# layers, Canon layers that read one token, and a recurrence.
USUAL = ("cat", "mh_cat", "ssm, canon", "llama, canon", "canon of one tap", "gla")
OTHERS = tuple(name for name in CASES if name not in USUAL)


@pytest.mark.parametrize(
    ("world_size", "names"),
    [
        pytest.param(2, USUAL, id="usual"),
        pytest.param(2, OTHERS, id="others", marks=pytest.mark.long),
        pytest.param(4, tuple(CASES), id="four ranks", marks=pytest.mark.nightly),
    ],
)
def test_parts_compute_what_whole_sequences_do(world_size, names):
    """Convolutions, halos, positions and documents, with all gradients."""
    for found in run_on_ranks(differences, world_size, {name: CASES[name] for name in names}):
        assert len(found) == world_size // 2 * len(names)
        wrong = {case: difference for case, difference in found.items() if not difference < 1e-12}
        assert not wrong


# Training


class Training(NamedTuple):
    """A run's model and ZeRO stage, more of its `train`, and how close parts must come to it."""

    model: dict[str, Any]
    stage: int
    train: Mapping[str, Any] = MappingProxyType({})
    rtol: float = 1e-5


# Taught on all queries, so that none are drawn, with shared keys and computed twice.
TAUGHT = LLAMA | {"conv_type": "head", "conv_window": 4, "attention": "landmark"}
BLOCKS = {"block": 3, "top_k": 1, "local": 1}
TAUGHT |= {"attention_options": BLOCKS | {"filter": "learned"}}
TAUGHT_SSM = TAUGHT | {"attention_options": BLOCKS | {"filter": "ssm", "filter_state": 4}}
GUIDED = {"landmark_loss": "guided", "landmark_rows": LENGTH, "activation_checkpointing": True}
CALIBRATE = GUIDED | {"landmark_loss": "calibrate", "init_from": "unread"}
RUNS = {
    "cat": Training(CASES["cat"], 0),
    "mh_cat, canon": Training(CASES["mh_cat"] | CANON, 1),
    "gla": Training(CASES["gla"], 2),
    "llama, canon": Training(CASES["llama, canon"] | {"conv_type": "head", "conv_window": 4}, 3),
    "guided": Training(TAUGHT, 3, GUIDED),
    "guided, bf16": Training(TAUGHT, 1, GUIDED | {"precision": "bf16"}, rtol=1e-2),
    "calibrate": Training(TAUGHT_SSM, 2, CALIBRATE),
    "ssm": Training(NEOX | SSM, 3),
}
OPTIMIZER = {"lr": 1e-3, "eps": 1e-4}  # else Adam makes whole steps of rounded zeros


def run_config(name: str, parts: int) -> RunConfig:
    run = RUNS[name]
    values = make_config(run.model, parts).model_dump()
    values["train"] |= {"zero_stage": run.stage, "global_batch_size": 4, "micro_batch_size": 1}
    values["train"] |= run.train
    values["optimizer"] |= OPTIMIZER | {"weight_decay": 0.0 if name == "calibrate" else 0.1}
    return RunConfig.model_validate(values)


def history(ranks, steps: int, cases: list[tuple[str, int]]) -> list[list[tuple[float, ...]]]:
    """Losses, the layers' own and gradient norms, and a validation's sums, of each (name, P)."""
    found = []
    for name, parts in cases:
        config = run_config(name, parts)
        model = build_model(config, VOCAB)
        with torch.no_grad():
            for parameter in landmarks_of(model):  # every head's its own
                parameter += 0.3 * torch.randn_like(parameter)
        engine = Engine(model, config, ranks)
        share, shares = ranks.share(parts)
        rows = slice(share * 4 // shares, (share + 1) * 4 // shares)
        given = [{key: x[rows] for key, x in packed_rows(step).items()} for step in range(steps)]
        results = [engine.train_step(batch, 1e-3) for batch in given]
        assert not any(result.skipped for result in results)
        held_out = ranks.sum(*engine.evaluate(given[0]))
        numbers = [(result.loss, result.auxiliary or 0.0, result.grad_norm) for result in results]
        found.append([*numbers, tuple(held_out)])
    return found


def landmarks_of(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [weights for name, weights in model.named_parameters() if ".core." in name]


def packed_rows(step: int) -> dict[str, np.ndarray]:
    """Four rows of many documents; one has few labels, all in its first part."""
    random = np.random.default_rng(step)
    batch = {name: random.integers(0, VOCAB, (4, LENGTH)) for name in ("input_ids", "labels")}
    batch["labels"][1, 5:] = IGNORE_INDEX
    starts = random.random((4, LENGTH)) < 0.15
    return batch | {"document_ids": starts.cumsum(axis=1)}


@pytest.mark.parametrize(
    ("world_size", "parts", "steps", "names"),
    [
        pytest.param(2, 2, 4, ("mh_cat, canon", "llama, canon", "ssm"), id="stages"),
        pytest.param(2, 2, 3, ("guided", "calibrate", "guided, bf16"), id="landmarks"),
        pytest.param(4, 2, 20, tuple(RUNS), id="two groups", marks=pytest.mark.nightly),
        pytest.param(4, 4, 20, tuple(RUNS), id="four parts", marks=pytest.mark.nightly),
    ],
)
def test_training_with_parts_equals_training_without(world_size, parts, steps, names):
    """With replicated and partitioned parameters, and where landmarks alone learn."""
    cases = [(name, p) for name in names for p in (1, parts)]
    for found in run_on_ranks(history, world_size, steps, cases):
        for (name, _), whole, divided in zip(cases[::2], found[::2], found[1::2], strict=True):
            for row, expected in zip(divided, whole, strict=True):
                np.testing.assert_allclose(row, expected, rtol=RUNS[name].rtol, err_msg=name)


def trained(ranks, data: str, folder: str, asked: list[tuple]) -> list[int]:
    """Train for each (folder, P, changes of `train`)."""
    codes = []
    for run, parts, changes in asked:
        changes = {"max_steps": 6, "sequence_parallel": parts, **changes}
        values = run_values(data, Path(folder) / run, **changes)
        values["model"] = CASES["cat"]
        values["data"]["mask_documents"] = True
        values["optimizer"] |= OPTIMIZER
        values["validation"] = {"every_steps": 3, "max_tokens": 512}
        values["checkpoint"] = {"every_steps": 3, "keep_last": 9}
        codes.append(train(ranks, values))
    return codes


def test_a_run_goes_on_with_other_parts(tiny_corpus, tmp_path):
    """On packed documents, with validation; P belongs to no checkpoint."""
    resumed = {"resume": str(tmp_path / "parts/checkpoints/step-00000003")}
    asked = [("parts", 2, {}), ("resumed", 1, resumed)]
    given = str(tiny_corpus), str(tmp_path)
    for codes in run_on_ranks(trained, 2, *given, asked):
        assert not any(codes)
    assert run_on_ranks(trained, 1, *given, [("whole", 1, {})]) == [[0]]
    wanted = {(row[0], len(row)): row for row in losses(tmp_path / "whole")}
    for run in ("parts", "resumed"):
        rows = losses(tmp_path / run)
        assert (rows[0][0], rows[-1][0]) == ({"parts": 1, "resumed": 4}[run], 6)
        for row in rows:
            np.testing.assert_allclose(row, wanted[row[0], len(row)], rtol=1e-5)
    log = (tmp_path / "parts/train.log").read_text()
    assert "at once on 2 ranks (2 share a sequence)" in log
    assert "train.sequence_parallel: was 2, is 1" in (tmp_path / "resumed/train.log").read_text()
