"""What a step costs beside its arithmetic, reads of the device and collectives; and its bits."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cat_lm.config import RunConfig
from cat_lm.training import engine as engine_module
from cat_lm.training.building import build_model
from cat_lm.training.checkpoint.optimizer_state import full_precision_weights
from cat_lm.training.engine import Engine
from tests.distributed.ranks import run_on_ranks
from tests.distributed.test_engine import (
    ROWS,
    VOCAB,
    InfiniteOnLastRank,
    global_batch,
    make_config,
    rows_of,
)

# Reads by the host: .item(), bool(), float() and the like, each of which waits for a GPU.
READ = torch.ops.aten._local_scalar_dense.default
CLIP = 1.25
# What takes the place of DeepSpeed's own steps.
STEPS = ("Bf16Step", "PartitionedStep")
CASTS = (torch.ops.aten._to_copy.default, torch.ops.aten.zero_.default)
NORMS = (torch.ops.aten.linalg_vector_norm.default, torch.ops.aten.norm.ScalarOpt_dim)


class Counting(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter = collections.Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.counts[operator] += 1
        return operator(*args, **(kwargs or {}))


@contextmanager
def counted(owner: object, name: str) -> Iterator[list[bool]]:
    """Notes each call of `owner.name`."""
    calls, original = [], getattr(owner, name)

    def noted(*given: Any, **named: Any) -> Any:
        calls.append(True)
        return original(*given, **named)

    with mock.patch.object(owner, name, noted):
        yield calls


def counted_steps(ranks, cases: list[tuple[int, str, int]]) -> list[tuple]:
    """(reads, lists read, all-reduces, norms, casts a parameter, flags) of each second step."""
    found, products = [], torch.backends.cuda.matmul
    for stage, precision, size in cases:
        config = make_config(stage, size, precision)
        products.allow_bf16_reduced_precision_reduction = True  # torch's default
        engine = Engine(build_model(config, VOCAB), config, ranks)
        assert not products.allow_bf16_reduced_precision_reduction, "parts of sums are rounded"
        engine.train_step(rows_of(global_batch(0), ranks), 1e-3)
        batch = rows_of(global_batch(1), ranks)
        with (
            Counting() as ops,
            counted(torch.Tensor, "tolist") as lists,
            counted(torch.distributed, "all_reduce") as reductions,
        ):
            flags = engine.train_step(batch, 1e-3, (ranks.rank, 5)).flags
        norms = sum(ops.counts[norm] for norm in NORMS)
        casts = sum(ops.counts[cast] for cast in CASTS) // len(list(engine.model.parameters()))
        found.append((ops.counts[READ], len(lists), len(reductions), norms, casts, flags))
    return found


def test_the_host_reads_once_a_step():
    """Whatever the number of micro-batches: loss, norm and flags in one list."""
    cases = [(0, "fp32", 4), (1, "bf16", 4), (1, "bf16", 1)]
    cases += [(1, "fp32", 4), (2, "fp32", 1), (2, "bf16", 4), (3, "bf16", 1)]
    for rank in run_on_ranks(counted_steps, 2, cases):
        for case, (reads, lists, reduced, norms, casts, flags) in zip(cases, rank, strict=True):
            assert (reads, lists) == (0, 1), case
            assert flags == (1, 10)
            if case[:2] == (1, "bf16"):
                assert reduced == 4  # scored tokens, each group's gradients, the loss with flags
                assert norms == 0, "a norm for each parameter is a kernel for each"
                assert casts == 0, "gradients are added and copied as they are"


def stale_sums(ranks) -> list[float]:
    """The largest gradients that are reduced for parameters without one, after a step with some."""
    config = make_config(1, 4, "bf16")
    engine = Engine(build_model(config, VOCAB), config, ranks)
    engine.train_step(rows_of(global_batch(0), ranks), 1e-3)
    sums = engine.deepspeed.optimizer.get_grads_for_reduction()[0]
    before = max(float(x.abs().max()) for x in sums)
    engine.deepspeed._reduce_non_expert_gradients(sums, 0)
    return [before, *(float(x.abs().max()) for x in sums)]


def test_a_parameter_without_a_gradient_keeps_none_of_the_last_step():
    for before, *after in run_on_ranks(stale_sums, 2):
        assert before > 0 and not any(after)


def bits(ranks, stage: int, precision: str) -> list[tuple]:
    """Steps and weights with DeepSpeed's own step and gradients, and with ours."""
    found = []
    for ours in (False, True):
        # With four passes a step; the limit lies between the norms, so that some are clipped.
        config = make_config(stage, ROWS // ranks.world_size // 4, precision)
        optimizer = config.optimizer.model_copy(update={"grad_clip": CLIP})
        config = config.model_copy(update={"optimizer": optimizer})
        deepspeed = config.deepspeed(ranks.world_size)
        deepspeed["bf16"]["immediate_grad_update"] = ours
        with (
            mock.patch.object(RunConfig, "deepspeed", lambda *_, given=deepspeed: given),
            mock.patch.multiple(
                engine_module,
                **{name: getattr(engine_module, name) if ours else mock.Mock() for name in STEPS},
            ),
        ):
            engine = Engine(build_model(config, VOCAB), config, ranks)
        engine._forward = last = InfiniteOnLastRank(engine, ranks)
        steps = []
        for step in range(6):
            last.bad = step in (0, 3)  # also before there are moments
            result = engine.train_step(rows_of(global_batch(step), ranks), 1e-2)
            steps.append((str(result.loss), result.grad_norm, result.skipped))
        assert all(p.grad is None for p in engine.model.parameters())
        weights = {name: w.numpy() for name, w in full_precision_weights(engine).items()}
        found.append((steps, weights, int(next(iter(engine.optimizer.state.values()))["step"])))
    return found


@pytest.mark.parametrize(
    ("world_size", "stage", "precision"),
    [
        (2, 1, "bf16"),
        (2, 2, "bf16"),
        (2, 3, "bf16"),
        pytest.param(2, 1, "fp32", marks=pytest.mark.long),
        pytest.param(1, 1, "bf16", marks=pytest.mark.nightly),
        pytest.param(2, 2, "fp32", marks=pytest.mark.nightly),
        pytest.param(2, 3, "fp32", marks=pytest.mark.nightly),
    ],
)
def test_the_step_has_the_bits_of_deepspeeds(world_size, stage, precision):
    for theirs, ours in run_on_ranks(bits, world_size, stage, precision):
        assert ours[0] == theirs[0] and [skipped for *_, skipped in ours[0]].count(True) == 2
        norms = [norm for _, norm, _ in ours[0]]
        assert norms[0] == math.inf and min(norms) < CLIP < sorted(norms)[-3], norms
        assert ours[2] == theirs[2] == 4
        assert ours[1].keys() == theirs[1].keys()
        assert all((ours[1][name] == theirs[1][name]).all() for name in ours[1])


def meeting_point(_) -> str:
    store = torch.distributed.distributed_c10d._get_default_store()
    while isinstance(store, torch.distributed.PrefixStore):
        store = store.underlying_store
    return type(store).__name__


def test_one_rank_listens_on_no_port():
    """Between the choice of a free one and its use, another process could take it."""
    assert run_on_ranks(meeting_point, 1) == ["HashStore"]


def test_one_rank_sends_nothing_and_rounds_nothing():
    values = make_config(1, 2).model_dump()
    values["train"]["gradient_communication"] = "bf16"
    config = RunConfig.model_validate(values)
    assert config.deepspeed(1)["communication_data_type"] == "fp32"
    assert config.deepspeed(2)["communication_data_type"] == "bf16"
