"""Runs a function on several gloo processes inside a test and returns what each rank returned."""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing


def run_on_ranks(function: Callable, world_size: int, *arguments: Any) -> list[Any]:
    """`[function(ranks, *arguments) for each rank]`; an error on any rank fails the test.

    `function` must be a module-level function; it runs in new processes joined by
    `cat_lm.training.distributed.start`, one thread each.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _one_rank,
            args=(world_size, port, folder, function, arguments),
            nprocs=world_size,
            start_method="spawn",
        )
        files = [Path(folder) / f"{rank}.pkl" for rank in range(world_size)]
        return [pickle.loads(file.read_bytes()) for file in files]


def _one_rank(
    rank: int, world_size: int, port: int, folder: str, function: Callable, arguments: tuple
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    from cat_lm.training import distributed

    try:
        with distributed.start() as ranks:
            result = function(ranks, *arguments)
    except BaseException:
        traceback.print_exc()
        raise
    (Path(folder) / f"{rank}.pkl").write_bytes(pickle.dumps(result))
    distributed.leave(0)
