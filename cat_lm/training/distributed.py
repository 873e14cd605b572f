"""Join the process group, choose a rank's device, and run small collectives."""

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

# The timeout of collectives: one rank may write a large checkpoint while the others wait.
TIMEOUT_MINUTES = 30.0


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, the number of ranks, and the device."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, parts: int) -> tuple[int, int]:
        """Return (index of this rank's group, number of groups) for groups of `parts` ranks."""
        return self.rank // parts, self.world_size // parts

    def sum(self, *values: float) -> list[float]:
        """Return the sum of each value over all ranks, in float64 (a collective)."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            torch.distributed.all_reduce(tensor)
        return tensor.tolist()

    def gather(self, value: object) -> list:
        """Return the list of every rank's `value`, in the order of ranks (a collective)."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    def broadcast(self, value: object) -> object:
        """Return rank 0's `value` on every rank (a collective)."""
        if self.world_size == 1:
            return value
        values = [value]
        torch.distributed.broadcast_object_list(values, src=0)
        return values[0]

    def on_all_ranks(self, action: Callable[[], Any]) -> Any:
        """Run `action` on every rank and return its result (a collective).

        Raises:
            SharedError: `action` failed on some rank. It is raised on all ranks, so that none waits
                for the others; `action` itself must therefore contain no collective. The error is
                temporary if all errors are.
        """
        result, error = None, None
        try:
            result = action()
        except Exception as raised:
            error = (is_temporary(raised), describe_error(raised))
        errors = [error for error in self.gather(error) if error is not None]
        if errors:  # Report permanent errors before transient ones.
            temporary, text = min(errors, key=lambda error: error[0])
            raise shared_error(text, temporary)
        return result

    def on_rank_zero(self, action: Callable[[], Any]) -> Any:
        """Run `action` on rank 0 only, with the errors of `on_all_ranks`; others return None."""
        return self.on_all_ranks(action if self.is_first else lambda: None)

    def describe(self) -> str:
        on_gpu = self.device.type == "cuda"
        kind = torch.cuda.get_device_name(self.device) if on_gpu else "CPU"
        return f"{self.world_size} rank{'s' if self.world_size > 1 else ''} on {kind}"


def collective_timeout(hang_minutes: float) -> float:
    """Return the timeout of collectives in minutes; the watchdog must find a hanging rank first."""
    return max(TIMEOUT_MINUTES, 2 * hang_minutes)


def describe_error(error: BaseException) -> str:
    """Return an error as one line; other errors than `UserError` with their file or class."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {describe_os_error(error)}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@contextmanager
def start(timeout_minutes: float = TIMEOUT_MINUTES) -> Iterator[Ranks]:
    """Join the process group of the launcher's variables, or a group of one without them.

    Raises:
        UserError: the launcher's variables are incomplete or contradict the machine.
        TemporaryError: not all ranks joined in time, for example because a node is down.
    """
    rank, local_rank, world_size = join_launcher()
    device = _select_device(local_rank)
    try:
        _init_process_group(device.type == "cuda", rank, world_size, timeout_minutes)
    except torch.distributed.DistBackendError as error:
        if "Duplicate GPU" not in str(error):  # A part of NCCL's message.
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
    # Not after an error, when another rank may wait in a collective; the launcher ends that rank.
    torch.distributed.destroy_process_group()


def _select_device(local_rank: int) -> torch.device:
    """Return this rank's GPU, after making it the current device, or the CPU without GPUs.

    If SLURM binds GPUs (--gpus-per-task, --gpu-bind), each task sees only its own GPU, as cuda:0.
    LOCAL_RANK is then set to 0, because DeepSpeed uses it as the device's index.
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


def _init_process_group(on_gpu: bool, rank: int, world_size: int, timeout_minutes: float) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if on_gpu else "cpu")
    # DeepSpeed divides the cores among CPU ranks by LOCAL_SIZE.
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    # ZeRO-3 would warn in every step about torch functions that DeepSpeed calls.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    backend, timeout = "nccl" if on_gpu else "gloo", timedelta(minutes=timeout_minutes)
    if world_size == 1 and not torch.distributed.is_initialized():
        # A group of one needs no port, which another process might take first.
        torch.distributed.init_process_group(
            backend, timeout=timeout, store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    with silence_deepspeed():
        import_deepspeed().init_distributed(
            dist_backend=backend,
            auto_mpi_discovery=False,
            timeout=timeout,
            rank=rank,
            world_size=world_size,
        )


@contextmanager
def silence_deepspeed() -> Iterator[None]:
    """Suppress what DeepSpeed prints and its warnings; its errors are exceptions."""
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def import_deepspeed():
    """Return the imported module of DeepSpeed, without its log and its C++ extension.

    Its CPU backend would compile a shared-memory all-reduce for tensor-parallel inference when the
    process group starts. That takes 40 seconds, and fails without a compiler; training uses gloo.
    """
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    # The attribute `deepspeed.comm.torch` is the torch package, and not this module.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    return deepspeed
