"""DeepSpeed's engine on one rank of a process group that is not there.

torch's fake process group says it has so many ranks and communicates nothing. DeepSpeed then checks
and partitions as it would on a cluster.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from typing import Any

from cat_lm.config import RunConfig


def narrowed(config: RunConfig) -> RunConfig:
    """`config` with few narrow layers and a small vocabulary, which any machine can hold."""
    model = config.architecture.narrowed(config.model)
    train = config.train.model_copy(update={"compile": False})
    return config.model_copy(update={"model": model, "train": train})


def partitions(shapes: list[list[int]], stage: int, ranks: int) -> list[int]:
    """Elements of the optimizer's state on the first rank, for each group of parameters.

    ZeRO-1 and 2 cut a group, laid end to end and padded to a multiple of 2 x ranks, into equal
    parts; ZeRO-3 cuts every parameter, each padded; without ZeRO nothing is cut.

    Args:
        shapes: the numbers of elements of the parameters of each group.
    """
    if stage == 0:
        return [sum(group) for group in shapes]
    if stage == 3:
        return [sum(math.ceil(size / ranks) for size in group) for group in shapes]
    return [2 * math.ceil(sum(group) / (2 * ranks)) for group in shapes]


def group_sizes(model: Any, weight_decay: float) -> list[list[int]]:
    """Elements of each parameter of each of the optimizer's groups."""
    from cat_lm.training.engine import parameter_groups

    groups = parameter_groups(model, weight_decay)
    return [[parameter.numel() for parameter in group["params"]] for group in groups]


def deepspeed_partitions(config: RunConfig, ranks: int) -> tuple[str, list[int]]:
    """(the optimizer's class, elements of its state on the first rank, by group).

    In a process of its own, since a process has one group.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_first_rank, (config, ranks))


def _first_rank(config: RunConfig, ranks: int) -> tuple[str, list[int]]:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(ranks), LOCAL_SIZE="1")
    # Nothing listens there; DeepSpeed wants to see the names set.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", DS_ACCELERATOR="cpu")
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from cat_lm.training.distributed import Ranks, import_deepspeed, quiet
    from cat_lm.training.engine import Engine, build_model

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    with quiet():
        import_deepspeed().init_distributed(
            dist_backend="gloo", auto_mpi_discovery=False, rank=0, world_size=ranks
        )
    engine = Engine(build_model(config, 0), config, Ranks(0, 0, ranks, torch.device("cpu")))
    optimizer = engine.optimizer
    for name in (
        "fp32_groups_flat_partition",  # BF16_Optimizer: ZeRO-1 in bf16
        "single_partition_of_fp32_groups",  # ZeRO-1 and 2
        "fp32_partitioned_groups_flat",  # ZeRO-3
    ):
        if hasattr(optimizer, name):
            return type(optimizer).__name__, [part.numel() for part in getattr(optimizer, name)]
    sizes = [sum(p.numel() for p in group["params"]) for group in optimizer.param_groups]
    return type(optimizer).__name__, sizes
