"""Runs a function on several gloo processes inside a test and returns what each rank returned."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing

from cat_lm.core.errors import hard_exit


def run_on_ranks(
    function: Callable, world_size: int, *arguments: Any, preloaded: bool = True
) -> list[Any]:
    """`[function(ranks, *arguments) for each rank]`; an error on any rank fails the test.

    `function` must be a module-level function; it runs in new processes joined by
    `cat_lm.training.distributed.start`, one thread each. They are forked from one that has imported
    what they need, which takes much longer than most of these functions; with `preloaded` false,
    and where there is a GPU, whose driver no fork survives, each is a new interpreter.
    """
    forked = preloaded and not torch.cuda.is_available()
    environment = dict(os.environ)
    if torch.cuda.is_available() and torch.cuda.device_count() < world_size:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # a rank has a GPU of its own, or none
    if forked:
        multiprocessing.set_forkserver_preload(["tests.distributed.preloaded"])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _one_rank,
            args=(world_size, port, folder, environment, function, arguments),
            nprocs=world_size,
            start_method="forkserver" if forked else "spawn",
        )
        files = [Path(folder) / f"{rank}.pkl" for rank in range(world_size)]
        return [pickle.loads(file.read_bytes()) for file in files]


def _one_rank(
    rank: int,
    world_size: int,
    port: int,
    folder: str,
    environment: dict[str, str],
    function: Callable,
    arguments: tuple,
) -> None:
    os.environ.clear()  # a forked process has the environment that the first of them was given
    os.environ.update(environment)
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
    hard_exit(0)
