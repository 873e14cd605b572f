"""The memory estimate against what ranks of small runs really take."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import numpy as np
import pytest

from cat_lm import architectures
from cat_lm.config import RunConfig
from cat_lm.counts import count_parameters
from cat_lm.training.building import build_model
from cat_lm.training.engine import Engine
from cat_lm.training.estimate import MEMORY_ACCURACY, Memory, memory_per_rank
from tests.cat_lm.architectures.test_families import CASES
from tests.distributed.ranks import run_on_ranks
from tests.runs import run_values


def case(
    world_size: int,
    model: dict,
    length: int,
    rows: int,
    vocab: int,
    documents: bool = False,
    **train,
) -> dict:
    values = run_values("unused", "unused", micro_batch_size=rows, max_steps=2, **train)
    shares = world_size // values["train"].get("sequence_parallel", 1)
    values["train"]["global_batch_size"] = 2 * rows * shares
    values["model"] = {"hidden_size": 256, "num_hidden_layers": 6, "vocab_size": vocab} | model
    values["data"] |= {"context_length": length, "mask_documents": documents}
    return values


def give_back_what_is_freed() -> None:
    """Have every larger block be the system's own, which takes it back at once, as on a GPU."""
    # The engine would have this rank keep it, were there no choice of its own.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    library, m_mmap_threshold = ctypes.CDLL(None), -3
    assert library.mallopt(m_mmap_threshold, 65536) == 1
    library.malloc_trim(0)


def resident(field: str) -> int:
    """Bytes of this process: VmRSS, what it has now, or VmHWM, the most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def forget_peak() -> None:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def run_steps(engine: Engine, ranks) -> None:
    config = engine.config
    rows = config.train.global_batch_size // config.count_rank_groups(ranks.world_size)
    shape = (rows, config.data.context_length)
    for seed in range(config.total_steps):
        random = np.random.default_rng(seed)
        batch = {
            name: random.integers(0, config.model.vocab_size, shape)
            for name in ("input_ids", "labels")
        }
        if config.data.mask_documents:
            batch["document_ids"] = (random.random(shape) < 0.01).cumsum(axis=1)
        assert not engine.train_step(batch, 1e-4).skipped


def measured(ranks, values: dict) -> tuple[int, Memory]:
    """(bytes that two steps take at their peak, weights and all; the estimate) of this rank."""
    give_back_what_is_freed()
    # What libraries take when they are first used is no part of a run's own.
    warm_up = values | {"model": values["model"] | {"hidden_size": 32, "num_hidden_layers": 1}}
    for each in (warm_up, values):
        config = RunConfig.model_validate(each)
        gc.collect()
        before = resident("VmRSS")
        model = build_model(config, 0)
        parameters, vocab_size = count_parameters(model), model.config.vocab_size
        engine = Engine(model, config, ranks)
        forget_peak()
        run_steps(engine, ranks)
        taken = resident("VmHWM") - before
        del engine, model
    return taken, memory_per_rank(config, parameters, ranks.world_size, vocab_size, on_gpu=False)


ATTENDING = {"num_attention_heads": 4, "conv_window": 4}
HEAD = ATTENDING | {"conv_type": "head"}
LONG = {"num_attention_heads": 4, "conv_type": "head", "conv_filter": "ssm", "conv_state": 64}
TAUGHT = HEAD | {"attention": "landmark", "attention_options": {"block": 64, "top_k": 2}}
# Long rows of a narrow model, in which masks are much.
PACKED = (2048, 1, 4000, True)
NARROW = {"hidden_size": 128}
STAGE_0, STAGE_3, BF16 = {"zero_stage": 0}, {"zero_stage": 3}, {"precision": "bf16"}


def of_family(name: str) -> tuple:
    """A family's plain model, of the keys that it must be given; a CPU may be slow in bf16."""
    fields = architectures.get(name).Section.model_fields
    needed = {key: value for key, value in CASES[name].items() if fields[key].is_required()}
    model = {"architecture": name} | needed
    return (1, model, (512, 2, 8000), {})


# The cases of CI have each stage of partitioning, both precisions, documents and parts of rows.
IN_CI = [
    (1, HEAD, (1024, 1, 8000), {"zero_stage": 1}),
    (2, ATTENDING | {"conv_type": "none"}, (256, 3, 8000), STAGE_3 | BF16),
    (2, TAUGHT | NARROW, PACKED, {"sequence_parallel": 2, "landmark_loss": "guided"}),
    (1, {"architecture": "mixer", "mixer": "gla"}, (512, 2, 8000), BF16),
]
NIGHTLY = [
    (1, ATTENDING | {"conv_type": "multihead"}, (256, 4, 16_000), STAGE_0 | BF16),
    (1, HEAD | {"architecture": "llama", "num_key_value_heads": 2}, (512, 4, 8000), {}),
    (1, {"architecture": "mamba2", "state_size": 64}, (512, 2, 8000), BF16),
    (1, LONG, (1024, 2, 8000), BF16),
    (1, HEAD | NARROW, PACKED, {}),
    (2, HEAD | NARROW, PACKED, {"sequence_parallel": 2}),
    (1, TAUGHT | NARROW, PACKED, BF16 | {"landmark_loss": "guided"}),
    *map(of_family, architectures.names()),
]


# A model has to be large for its memory to show beside the libraries': minutes.
@pytest.mark.parametrize(
    ("world_size", "model", "shape", "train"),
    [
        *(pytest.param(*case, marks=pytest.mark.long) for case in IN_CI),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY),
    ],
)
def test_the_estimate_is_what_runs_take(world_size, model, shape, train):
    values = case(world_size, model, *shape, **train)
    for taken, estimate in run_on_ranks(measured, world_size, values):
        ratio = estimate.total / taken
        assert 1 / MEMORY_ACCURACY < ratio < MEMORY_ACCURACY, f"{taken / 2**30:.2f}: {estimate}"
