"""The engine against a plain PyTorch loop (R17), on one and two ranks, for every ZeRO stage."""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import pytest
import torch

from cat_lm.config import RunConfig
from cat_lm.training.building import build_model, parameter_groups
from cat_lm.training.checkpoint.optimizer_state import full_precision_weights
from cat_lm.training.engine import Engine
from tests.cat_lm.model.attention_entries import register_entries
from tests.distributed.ranks import run_on_ranks
from tests.distributed.test_resume import LAS

VOCAB, LENGTH, ROWS, STEPS = 61, 24, 8, 5
RATES = (1e-3, 3e-3, 5e-3, 2e-3, 1e-3)


MODEL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_type": "head",
    "conv_window": 5,
}
DEEPSPEED = RunConfig.deepspeed
# Parameters of attention's own, and biases that the convolution holds.
LLAMA = MODEL | {"architecture": "llama", "num_key_value_heads": 2, "attention_bias": True}
LLAMA |= {"score_transform": "decay", "value_transform": "box"}


def make_config(
    stage: int, micro_batch_size: int, precision: str = "fp32", model: dict = MODEL
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": model,
            "data": {"path": "unused", "context_length": LENGTH},
            # The gradient of the keys' bias is zero but for rounding; a common eps would let Adam
            # turn that rounding into steps of full size.
            "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "grad_clip": 0.5, "eps": 1e-4},
            "train": {
                "output_dir": "unused",
                "global_batch_size": ROWS,
                "micro_batch_size": micro_batch_size,
                "max_steps": STEPS,
                "precision": precision,
                "zero_stage": stage,
            },
        }
    )


def global_batch(step: int) -> dict[str, np.ndarray]:
    """Rows with very different numbers of scored tokens: means of means would be wrong."""
    random = np.random.default_rng(step)
    batch = {name: random.integers(0, VOCAB, (ROWS, LENGTH)) for name in ("input_ids", "labels")}
    for row in range(ROWS):
        batch["labels"][row, : 3 * row] = -100
    return batch


def rows_of(batch: dict[str, np.ndarray], ranks) -> dict[str, np.ndarray]:
    share = ROWS // ranks.world_size
    return {k: v[ranks.rank * share : (ranks.rank + 1) * share] for k, v in batch.items()}


def plain_loop() -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Mean loss over all scored tokens, clipping, AdamW: nothing of DeepSpeed, no accumulation."""
    config = make_config(0, ROWS)
    model = build_model(config, VOCAB).train()
    optimizer = torch.optim.AdamW(
        parameter_groups(model, 0.1), betas=config.optimizer.betas, eps=config.optimizer.eps
    )
    history = []
    for step, lr in enumerate(RATES):
        for group in optimizer.param_groups:
            group["lr"] = lr
        batch = {k: torch.from_numpy(v) for k, v in global_batch(step).items()}
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.grad_clip)
        optimizer.step()
        history.append((loss.item(), norm.item()))
    return history, {name: p.detach().clone() for name, p in model.named_parameters()}


def engine_loops(ranks, cases):
    """(history, fp32 weights) of the engine for each (stage, micro-batch size)."""
    results = []
    for stage, micro_batch_size in cases:
        config = make_config(stage, micro_batch_size)
        engine = Engine(build_model(config, VOCAB), config, ranks)
        history = []
        for step, lr in enumerate(RATES):
            result = engine.train_step(rows_of(global_batch(step), ranks), lr)
            history.append((result.loss, result.grad_norm))
            assert not result.skipped
        results.append((history, full_precision_weights(engine)))
    return results


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_engine_equals_plain_pytorch(world_size):
    """1 x 8, 8 x 1 and ranks between: the same losses, gradient norms and weights."""
    per_rank = ROWS // world_size
    cases = [(0, 1), (1, per_rank), (2, 1), (3, 1), (3, per_rank)]
    expected_history, expected_weights = plain_loop()
    results = run_on_ranks(engine_loops, world_size, cases)[0]
    for case, (history, weights) in zip(cases, results, strict=True):
        np.testing.assert_allclose(history, expected_history, rtol=2e-5, err_msg=str(case))
        assert weights.keys() == expected_weights.keys()
        for name, weight in weights.items():
            difference = (weight - expected_weights[name]).abs().max().item()
            assert difference < 2e-5, (case, name, difference)


def bf16_loops(ranks):
    history = []
    for stage in (0, 1, 2, 3):
        config = make_config(stage, 2, "bf16")
        engine = Engine(build_model(config, VOCAB), config, ranks)
        weights = full_precision_weights(engine)
        assert all(weight.dtype == torch.float32 for weight in weights.values())
        dtypes = []
        engine.model.gpt_neox.layers[0].mlp.dense_h_to_4h.register_forward_hook(
            lambda module, inputs, output, dtypes=dtypes: dtypes.append(output.dtype)
        )
        steps = [
            engine.train_step(rows_of(global_batch(s), ranks), lr) for s, lr in enumerate(RATES)
        ]
        assert set(dtypes) == {torch.bfloat16}, "computed in another precision"
        history.append([step.loss for step in steps])
    return history


def test_bf16_follows_fp32():
    expected = [loss for loss, _ in plain_loop()[0]]
    for losses in run_on_ranks(bf16_loops, 2)[0]:
        np.testing.assert_allclose(losses, expected, rtol=1e-2)


class InfiniteOnLastRank:
    """The engine's loss, but infinite on the last rank while `bad`."""

    def __init__(self, engine, ranks):
        self.outputs, self.bad = engine._forward, False
        self.is_last = ranks.rank == ranks.world_size - 1

    def __call__(self, micro_batch, num_items_in_batch):
        outputs = self.outputs(micro_batch, num_items_in_batch)
        if self.bad and self.is_last:
            outputs.loss = outputs.loss * math.inf
        return outputs


def bad_steps(ranks, precision):
    """A loss that is not finite on one rank only, in every micro-batch of the second step."""
    outcome = []
    for stage in (0, 1, 2, 3):
        config = make_config(stage, 2, precision)
        engine = Engine(build_model(config, VOCAB), config, ranks)
        engine._forward = last = InfiniteOnLastRank(engine, ranks)
        engine.train_step(rows_of(global_batch(0), ranks), 1e-2)
        before = full_precision_weights(engine)
        last.bad = True
        result = engine.train_step(rows_of(global_batch(1), ranks), 1e-2)
        after = full_precision_weights(engine)
        last.bad = False
        good = engine.train_step(rows_of(global_batch(1), ranks), 1e-2)
        moved = full_precision_weights(engine)
        outcome.append(
            {
                "skipped": result.skipped,
                "unchanged": all(before[k].equal(after[k]) for k in before),
                "goes on": not good.skipped and math.isfinite(good.loss),
                "learns": not all(moved[k].equal(after[k]) for k in moved) or not moved,
            }
        )
    return outcome


@pytest.mark.parametrize(
    ("world_size", "precision"),
    [
        (2, "fp32"),
        pytest.param(2, "bf16", marks=pytest.mark.long),
        pytest.param(1, "fp32", marks=pytest.mark.nightly),
    ],
)
def test_a_step_that_is_not_finite_is_skipped_on_all_ranks(world_size, precision):
    for outcomes in run_on_ranks(bad_steps, world_size, precision):
        for stage, outcome in enumerate(outcomes):
            assert all(outcome.values()), (stage, outcome)


# What changes of model, data and train; the first group changes what is sharded or drawn.
SHARDED = {
    "checkpointed": ({}, {}, {"activation_checkpointing": True}),
    "tied": ({"tie_word_embeddings": True}, {}, {}),
    "las": (LAS, {"mask_documents": True}, {}),
    "parameters of attention": (LLAMA, {}, {}),
    "dropout": ({"attention_dropout": 0.5, "hidden_dropout": 0.2}, {}, {}),
}
OTHERS = {
    "masked": ({}, {"mask_documents": True}, {}),
    "multihead": ({"conv_type": "multihead", "conv_init": "uniform"}, {}, {}),
    "parts": (
        {"canon": "ACD", "conv_rank": 2, "qk_norm": "l2", "qk_norm_place": "before"},
        *({}, {}),
    ),
    "long filters": (
        {"conv_filter": "ssm", "conv_state": 4, "conv_window": 21, "conv_init": "uniform"},
        *({}, {}),
    ),
}
COMPILED = {"compiled": ({}, {}, {"compile": True})}


def partitioned(config: RunConfig, world_size: int) -> dict:
    """Have ZeRO-3 partition parameters as small as these, too."""
    settings = DEEPSPEED(config, world_size)
    settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return settings


def option_losses(ranks, options, stages):
    """Losses of three steps with each set of options at each stage; and what dropout draws."""
    register_entries()  # which a process that has other tests behind it may have
    losses, draws = {}, []
    for name, (model, data, train) in options.items():
        for stage in stages:
            values = make_config(stage, 2).model_dump()
            values["model"] = model if "architecture" in model else values["model"] | model
            values["data"] |= data
            values["train"] |= train
            config = RunConfig.model_validate(values)
            built = build_model(config, VOCAB)
            names = {n for n, _ in built.named_parameters()}
            with mock.patch.object(RunConfig, "deepspeed", partitioned):
                engine = Engine(built, config, ranks)
            draws.append(torch.rand(1).item())
            assert set(full_precision_weights(engine)) <= names
            steps = []
            for step in range(3):
                batch = rows_of(global_batch(step), ranks)
                if config.data.mask_documents:
                    batch["document_ids"] = np.cumsum(batch["input_ids"] < 5, axis=1)
                steps.append(engine.train_step(batch, 3e-3).loss)
            losses[name, stage] = steps
    return losses, draws


@pytest.mark.parametrize(
    ("options", "stage"),
    [
        (SHARDED, 3),
        pytest.param(OTHERS, 2, marks=pytest.mark.long),
        pytest.param(COMPILED, 1, marks=pytest.mark.long),
        pytest.param(OTHERS, 3, marks=pytest.mark.nightly),
        pytest.param(SHARDED | OTHERS, 1, marks=pytest.mark.nightly),
    ],
    ids=["sharded", "others", "compiled", "others in 3", "all in 1"],
)
def test_options_act_the_same_under_every_stage(options, stage):
    options = {"plain": ({}, {}, {}), **options}
    (losses, draws), (_, other_draws) = run_on_ranks(option_losses, 2, options, (0, stage))
    for name in options:
        assert losses[name, stage] == pytest.approx(losses[name, 0], rel=1e-4), name
        is_same = name in ("plain", "checkpointed", "compiled")
        assert (losses[name, 0] == pytest.approx(losses["plain", 0], rel=1e-4)) == is_same, name
    assert not set(draws) & set(other_draws), "ranks must not draw the same dropout"


def test_decay_groups_exempt_biases_norms_and_filters():
    model = build_model(make_config(0, 1), VOCAB)
    decayed, exempt = parameter_groups(model, 0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    assert decayed["weight_decay"] == 0.1 and exempt["weight_decay"] == 0.0
    for parameter in exempt["params"]:
        name = names[id(parameter)]
        assert name.endswith("bias") or "norm" in name or "filter" in name
    assert all(names[id(p)].endswith("weight") for p in decayed["params"])
    assert len(decayed["params"]) + len(exempt["params"]) == len(names)
    assert sum("filter" in names[id(p)] for p in exempt["params"]) == 2 * 3
