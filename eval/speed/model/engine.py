"""`python -m eval.speed engine CONFIG.yaml`: a run's step as `train.py` makes it, and its memory.

DeepSpeed's engine with the configuration's precision, ZeRO stage, clipping and AdamW takes steps on
random tokens: no data are read, but for the size of a vocabulary that the configuration leaves to
them, and nothing is saved. Peak memory stands beside the estimate that
refuses runs before they start (`cat_lm.training.estimate`); on a CPU it holds also what libraries
take when they are first used. Under a launcher all its ranks take the steps; memory is the first's.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cat_lm.config import RunConfig, load_config
from cat_lm.errors import UserError
from cat_lm.training.estimate import (
    count_parameters,
    flops_per_token,
    memory_per_rank,
    peak_flops,
)
from eval.speed.machine import forget_peak, resident_bytes
from eval.speed.progress import rounds, say
from eval.speed.timing import summary

WARM_UPS = 2


def engine_speed(path: Path, overrides: Sequence[str], repeats: int) -> dict[str, Any]:
    """Time `repeats` steps of one configuration, and measure this rank's peak memory.

    Args:
        path, overrides: the configuration and its changes, as `train.py` takes them.

    Raises:
        UserError: the configuration is wrong, its model cannot be built, or its vocabulary is that
            of data that are not there.
    """
    from cat_lm.training import distributed
    from cat_lm.training.engine import resolve_precision

    config = load_config(path, overrides)
    with distributed.start() as ranks:
        precision, _ = resolve_precision(config, ranks.device)
        train = config.train.model_copy(update={"precision": precision})
        vocab_size = ranks.on_all_ranks(lambda: _vocabulary(config))
        model = config.model.model_copy(update={"vocab_size": vocab_size})
        config = config.model_copy(update={"train": train, "model": model})
        return {
            "config": str(path),
            "overrides": list(overrides),
            "ranks": ranks.world_size,
            **_measure(config, ranks, repeats),
        }


def _vocabulary(config: RunConfig) -> int:
    """Give the configuration's, else what `train.py` takes: that of the data or the first model."""
    from cat_lm.data.opening import open_split
    from cat_lm.training.init_from import vocab_size

    if config.model.vocab_size is not None:
        return config.model.vocab_size
    try:
        return vocab_size(config, open_split(config.data, "train"), checkpoint=None)
    except UserError as error:
        data = f"data.path={config.data.path}" if config.data.path else "data.mixture"
        raise UserError(
            f"model.vocab_size: is left to {data}, which must be there: {error}; "
            "or give model.vocab_size=N"
        ) from None


def _measure(config: RunConfig, ranks: Any, repeats: int) -> dict[str, Any]:
    from cat_lm.training.engine import Engine, build_model, convolution_backend

    on_gpu = ranks.device.type == "cuda"
    gc.collect()
    before = 0 if on_gpu else resident_bytes("VmRSS")
    say("building the model")
    model = build_model(config, config.model.vocab_size)
    parameters, vocab_size = count_parameters(model), model.config.vocab_size
    backend = convolution_backend(config, model.config, ranks.device)
    flops = flops_per_token(model.config, parameters, config.data.context_length)
    engine = Engine(model, config, ranks)
    if not on_gpu:
        forget_peak()
    seconds, host_seconds = _steps(engine, ranks, vocab_size, repeats)
    peak = torch.cuda.max_memory_allocated() if on_gpu else resident_bytes("VmHWM")
    estimate = memory_per_rank(config, parameters, ranks.world_size, vocab_size, on_gpu)
    tokens = config.train.global_batch_size * config.data.context_length
    median, peak_each = summary(seconds)["median"], peak_flops(config, ranks.device)
    device_flops = peak_each * ranks.world_size if peak_each else None
    return {
        "model": config.model.model_dump(),
        "train": config.train.model_dump(),
        "convolution": backend,
        "parameters": parameters,
        "tokens_per_step": tokens,
        "step_seconds": summary(seconds),
        "host_seconds": summary(host_seconds),
        "tokens_per_second": tokens / median,
        "flops_per_step": flops * tokens,
        "peak_flops": device_flops,
        "mfu": flops * tokens / median / device_flops if device_flops else None,
        "memory": {
            "measured_bytes": peak - before,
            "reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else None,
            "estimated_bytes": estimate.total,
            "estimated_parts": {
                name: getattr(estimate, name)
                for name in ("weights", "gradients", "optimizer", "activations", "buffers")
            },
        },
    }


def _steps(
    engine: Any, ranks: Any, vocab_size: int, repeats: int
) -> tuple[list[float], list[float]]:
    """(seconds, the process's CPU seconds) of each step after the warm-up.

    Each has random tokens of its own. CPU time does not grow where others use the cores, too.
    """
    config, random, seconds = engine.config, np.random.default_rng(0), []
    host_seconds: list[float] = []
    rows = config.train.global_batch_size // config.row_shares(ranks.world_size)
    for number in rounds(WARM_UPS + repeats, "steps"):
        ids = random.integers(0, vocab_size, (rows, config.data.context_length))
        start, host_start = time.perf_counter(), time.process_time()
        engine.train_step({"input_ids": ids, "labels": ids}, lr=1e-6)
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)
        if number >= WARM_UPS:
            seconds.append(time.perf_counter() - start)
            host_seconds.append(time.process_time() - host_start)
    return seconds, host_seconds


def engine_lines(record: dict[str, Any]) -> list[str]:
    """Write the record as lines: speed, then memory beside its estimate."""
    low, high = record["step_seconds"]["quartiles"]
    memory, mfu = record["memory"], record["mfu"]
    parts = record["train"].get("sequence_parallel", 1)
    shared = f" ({parts} share a sequence)" if parts > 1 else ""
    ratio = memory["estimated_bytes"] / memory["measured_bytes"]
    return [
        f"{record['config']}: {record['parameters']:,} parameters, ZeRO "
        f"{record['train']['zero_stage']}, {record['train']['precision']}, "
        f"{record['ranks']} rank{'s' if record['ranks'] > 1 else ''}{shared}, "
        f"{record['tokens_per_step']:,} tokens a step",
        f"step {record['step_seconds']['median']:.4f} s ({low:.4f}-{high:.4f}), "
        f"{record['tokens_per_second']:,.0f} tokens/s, MFU "
        f"{'unknown' if mfu is None else f'{mfu:.1%}'}, "
        f"{record['host_seconds']['median']:.4f} s of CPU time",
        f"peak memory {memory['measured_bytes'] / 2**30:.3f} GiB, estimated "
        f"{memory['estimated_bytes'] / 2**30:.3f} GiB ({ratio:.2f} of what it took)",
    ]
