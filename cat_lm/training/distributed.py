"""Ranks: how this process was started, its device, and small collectives."""

from __future__ import annotations

import importlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from cat_lm.core.errors import (
    TemporaryError,
    UserError,
    describe_os_error,
    is_temporary,
    shared_error,
)
from cat_lm.training.launcher import join_launcher
from cat_lm.training.watchdog import host_name

# Of a collective: long enough for one rank to write a large checkpoint while the others wait.
TIMEOUT_MINUTES = 30.0


@dataclass(frozen=True)
class Ranks:
    """This process among its peers."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, parts: int) -> tuple[int, int]:
        """Return this rank's share of a batch's rows and the shares, each of `parts` ranks."""
        return self.rank // parts, self.world_size // parts

    def sum(self, *values: float) -> list[float]:
        """Sum each value over all ranks, in float64."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            torch.distributed.all_reduce(tensor)
        return tensor.tolist()

    def gather(self, value: object) -> list:
        """Return `value` of every rank, in their order."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    def broadcast(self, value: object) -> object:
        """Return the first rank's `value`, on every rank."""
        if self.world_size == 1:
            return value
        values = [value]
        torch.distributed.broadcast_object_list(values, src=0)
        return values[0]

    def on_all_ranks(self, action: Callable[[], Any]) -> Any:
        """Run `action` on every rank and return its result (a collective).

        Raises:
            SharedError: it failed on some rank; raised on all of them, so that none waits for the
                others. So `action` itself must hold no collective. Temporary where all that
                failed is.
        """
        result, error = None, None
        try:
            result = action()
        except Exception as raised:
            error = (is_temporary(raised), describe_error(raised))
        errors = [error for error in self.gather(error) if error is not None]
        if errors:  # Errors that stay come before transient ones.
            temporary, text = min(errors, key=lambda error: error[0])
            raise shared_error(text, temporary)
        return result

    def on_rank_zero(self, action: Callable[[], Any]) -> Any:
        """Act on the first rank only, as `on_all_ranks` does; the others get None."""
        return self.on_all_ranks(action if self.is_first else lambda: None)

    def describe(self) -> str:
        on_gpu = self.device.type == "cuda"
        kind = torch.cuda.get_device_name(self.device) if on_gpu else "CPU"
        return f"{self.world_size} rank{'s' if self.world_size > 1 else ''} on {kind}"


def patience(hang_minutes: float) -> float:
    """Return the minutes that a collective waits: the watchdog must find a hanging rank first."""
    return max(TIMEOUT_MINUTES, 2 * hang_minutes)


def describe_error(error: BaseException) -> str:
    """Return one line for an error, with its file or its type where it is no `UserError`."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {describe_os_error(error)}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@contextmanager
def start(timeout_minutes: float = TIMEOUT_MINUTES) -> Iterator[Ranks]:
    """Join the process group that the environment describes; alone, a group of one.

    Raises:
        UserError: the launcher's variables are incomplete or contradict the machine.
        TemporaryError: the ranks did not all meet in time, as where a node is down.
    """
    rank, local_rank, world_size = join_launcher()
    device = _own_device(local_rank)
    try:
        _start_deepspeed(device.type == "cuda", rank, world_size, timeout_minutes)
    except torch.distributed.DistBackendError as error:
        if "Duplicate GPU" not in str(error):  # NCCL's words
            raise
        raise UserError(
            f"rank {rank} on {host_name()}: another rank has the same GPU; this task sees "
            f"{torch.cuda.device_count()}; start one rank per GPU"
        ) from None
    except (torch.distributed.DistStoreError, torch.distributed.DistNetworkError) as error:
        place = ":".join(os.environ.get(f"MASTER_{part}", "") for part in ("ADDR", "PORT"))
        raise TemporaryError(
            f"rank {rank} on {host_name()}: {world_size} ranks were started and did not all meet "
            f"at {place} ({' '.join(str(error).split())}); when all nodes answer, the same command "
            "starts again"
        ) from None
    yield Ranks(rank, local_rank, world_size, device)
    # Not after an error: another rank may still wait in a collective, and the launcher ends it.
    torch.distributed.destroy_process_group()


def _own_device(local_rank: int) -> torch.device:
    """Return this rank's GPU, made the current one; a CPU where there is none.

    Where SLURM binds GPUs (--gpus-per-task, --gpu-bind), each task sees one, its own, as cuda:0.
    DeepSpeed takes LOCAL_RANK for the device's number, so it is 0 there.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    seen = torch.cuda.device_count()
    if seen == 1:
        os.environ["LOCAL_RANK"] = "0"
    elif local_rank >= seen:
        raise UserError(
            f"local rank {local_rank} has no GPU of its own: this node shows {seen}; start one "
            "rank per GPU"
        )
    device = torch.device("cuda", 0 if seen == 1 else local_rank)
    torch.cuda.set_device(device)
    return device


def _start_deepspeed(on_gpu: bool, rank: int, world_size: int, timeout_minutes: float) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if on_gpu else "cpu")
    # On CPU ranks DeepSpeed reads the local world size to divide the cores.
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    # Said in every step of ZeRO-3 about torch functions that DeepSpeed calls.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    backend, timeout = "nccl" if on_gpu else "gloo", timedelta(minutes=timeout_minutes)
    if world_size == 1 and not torch.distributed.is_initialized():
        # A group of one meets nobody: a port that was free may be another's when it is listened on.
        torch.distributed.init_process_group(
            backend, timeout=timeout, store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    with quiet():
        import_deepspeed().init_distributed(
            dist_backend=backend,
            auto_mpi_discovery=False,
            timeout=timeout,
            rank=rank,
            world_size=world_size,
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Keep DeepSpeed's prints and warnings off the run's log; its errors are exceptions."""
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def import_deepspeed():
    """Import DeepSpeed, quiet, and without a C++ compiler's help.

    Its CPU backend would compile a shared-memory all-reduce for tensor-parallel inference when the
    process group starts: 40 seconds with a compiler, a crash without. Training reduces by gloo.
    """
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    # `deepspeed.comm.torch` as an attribute is the torch package, not this module.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    return deepspeed
