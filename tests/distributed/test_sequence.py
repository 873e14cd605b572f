"""Ranks that share sequences (`train.sequence_parallel`) compute what one rank computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from cat_lm.config import RunConfig
from cat_lm.ops.documents import document_runs
from cat_lm.training.engine import build_model
from cat_lm.training.sequence import sequence_group
from tests.distributed.ranks import run_on_ranks
from tests.distributed.trainers import opened
from tests.runs import losses, run_values

VOCAB, LENGTH, ROWS = 61, 24, 3
SIZES = {"hidden_size": 32, "num_hidden_layers": 2}
NEOX = SIZES | {"num_attention_heads": 4, "intermediate_size": 64}
LLAMA = NEOX | {"architecture": "llama", "num_attention_heads": 8, "num_key_value_heads": 4}
LINEAR = SIZES | {"num_heads": 4, "intermediate_size": 48}
# W − 1 = 5 tokens before a part of 6 (P = 4) or 12: a halo of nearly a whole part.
MULTIHEAD = {"conv_type": "multihead", "conv_window": 6}
CANON = {"canon": "ACD", "canon_window": 4, "canon_init": "uniform"}
CASES = {
    "pythia": NEOX,
    "cat": NEOX | {"conv_type": "head", "conv_window": 21, "qk_norm": "l2"},
    "mh_cat": NEOX | MULTIHEAD | {"qk_norm": "l2", "qk_norm_place": "before"},
    "ranks": NEOX | {"conv_type": "head", "conv_window": 5, "conv_rank": 2, "conv_streams": "qk"},
    "ssm, canon": NEOX | {"conv_type": "head", "conv_filter": "ssm", "conv_state": 4} | CANON,
    "landmark": NEOX
    | {"conv_type": "head", "conv_window": 4, "attention": "landmark"}
    | {"attention_options": {"block": 4, "top_k": 1, "filter": "learned", "combine": "grouped"}},
    "llama": LLAMA
    | {"conv_type": "depthwise", "conv_window": 4, "conv_activation": "silu"}
    | {"attention_bias": True, "qk_norm": "l2", "conv_norm": "l1"},
    "llama, canon": LLAMA | CANON,
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
        given |= {name: group.own(given[name], 1) for name in ("input_ids", "shift_labels")}
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
    groups = {parts: sequence_group(make_config(NEOX, parts), ranks) for parts in (2, 4)}
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


def test_parts_compute_what_whole_sequences_do():
    """Convolutions, halos, positions, documents, scores and recurrences, with all gradients."""
    for found in run_on_ranks(differences, 4, CASES):
        assert len(found) == 2 * len(CASES)
        wrong = {case: difference for case, difference in found.items() if not difference < 1e-12}
        assert not wrong


# Training

STEPS = 20
RUNS = {  # the model and ZeRO stage of a run
    "cat": (CASES["cat"], 0),
    "mh_cat, canon": (CASES["mh_cat"] | CANON, 1),
    "gla": (CASES["gla"], 2),
    "llama, canon": (CASES["llama, canon"] | {"conv_type": "head", "conv_window": 4}, 3),
}


def values_of(data: str, run: Path, name: str, parts: int, **train: Any) -> dict[str, Any]:
    """20 steps on packed documents, some of them longer than a window and most much shorter."""
    model, stage = RUNS[name]
    train = {"max_steps": STEPS, "sequence_parallel": parts, "zero_stage": stage, **train}
    values = run_values(data, run, **train)
    values["model"] = model
    values["data"]["mask_documents"] = True
    # Else Adam makes steps of full size of what rounding leaves of gradients that are none.
    values["optimizer"] |= {"lr": 1e-3, "eps": 1e-4}
    values["validation"] = {"every_steps": 10, "max_tokens": 512}
    values["checkpoint"] = {"every_steps": 10, "keep_last": 9}
    return values


def train(ranks, data: str, folder: str, asked: list[tuple]) -> list[int]:
    """Run train.py's Trainer for each (name of the run, folder, parts, changes of `train`)."""
    from train import Trainer

    codes = []
    for name, run, parts, changes in asked:
        with opened(
            Trainer, ranks, values_of(data, Path(folder) / run, name, parts, **changes)
        ) as t:
            codes.append(t.run())
    return codes


def same_losses(found: Path, wanted: Path) -> None:
    """Losses, gradient norms and validations; those of steps that a resumed run did not take."""
    wanted_rows = {(row[0], len(row)): row for row in losses(wanted)}
    rows = losses(found)
    assert rows[-1][0] == STEPS and any(len(row) == 2 for row in rows)
    for row in rows:
        np.testing.assert_allclose(row, wanted_rows[row[0], len(row)], rtol=1e-5, err_msg=str(row))


def straight(parts: tuple[int, ...], names=RUNS) -> list[tuple]:
    return [(name, f"{name}-{p}", p, {}) for name in names for p in (1, *parts)]


def test_training_with_parts_equals_training_without(tiny_corpus, tmp_path):
    """In every ZeRO stage; and a run goes on with another number of parts, and of ranks."""
    asked = straight((2,))
    resumed = {"resume": str(tmp_path / "cat-2/checkpoints/step-00000010")}
    asked.append(("cat", "whole", 1, resumed))
    for codes in run_on_ranks(train, 2, str(tiny_corpus), str(tmp_path), asked):
        assert not any(codes)
    for name in RUNS:
        same_losses(tmp_path / f"{name}-2", tmp_path / f"{name}-1")
    same_losses(tmp_path / "whole", tmp_path / "cat-1")
    log = (tmp_path / "gla-2/train.log").read_text()
    assert "sequences: 2 neighbouring ranks share each, 16 of 32 tokens a rank" in log
    assert "train.sequence_parallel: was 2, is 1" in (tmp_path / "whole/train.log").read_text()
