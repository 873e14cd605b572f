"""What a node gives a rank beside its device, and what of it slows a run or breaks its network.

As in `facts` and `rules`: a rank says what it sees, and all ranks judge all of it, alike.
"""

from __future__ import annotations

import os
import resource
import stat
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from cat_lm.training.preflight.facts import Facts
    from cat_lm.training.preflight.rules import PreflightReport

# A GPU's rank computes in two threads, reads ahead in a third, and NCCL has its own.
FEWEST_CORES = 4
_INFINIBAND = Path("/sys/class/infiniband")  # RoCE's and EFA's devices, too


@dataclass(frozen=True)
class NodeFacts:
    """What a node gives one rank.

    Attributes:
        cores: the numbers of those that it may run on; ranks that are not bound share them.
        triton_cache: the folder that Triton keeps compiled kernels in.
        near_cores: those on the socket (NUMA node) of its GPU; empty where the node does not tell.
        locked_memory: bytes that it may lock into memory; None: as many as there are.
        has_rdma: whether the node has a network whose transfers go into locked memory.
    """

    cores: tuple[int, ...]
    triton_cache: str = ""
    near_cores: tuple[int, ...] = ()
    locked_memory: int | None = None
    has_rdma: bool = False


def collect(device: torch.device) -> NodeFacts:
    """Look at this process's share of its node."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    on_gpu = device.type == "cuda"
    return NodeFacts(
        cores=tuple(sorted(os.sched_getaffinity(0))),
        triton_cache=os.environ.get("TRITON_CACHE_DIR", "~/.triton/cache"),
        near_cores=near_cores(str(torch.cuda.get_device_properties(device).uuid)) if on_gpu else (),
        locked_memory=None if limit == resource.RLIM_INFINITY else limit,
        has_rdma=_INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()),
    )


def near_cores(
    uuid: str,
    gpus: Path = Path("/proc/driver/nvidia/gpus"),
    devices: Path = Path("/sys/bus/pci/devices"),
) -> tuple[int, ...]:
    """The cores of the socket that an NVIDIA GPU hangs on; none where the system does not tell.

    Args:
        uuid: the GPU's, in the driver's description of which it stands.
    """
    with suppress(OSError, ValueError):
        for folder in gpus.iterdir():
            if uuid in (folder / "information").read_text(encoding="ascii", errors="replace"):
                near = devices / folder.name / "local_cpulist"
                return _numbers(near.read_text(encoding="ascii"))
    return ()


def _numbers(text: str) -> tuple[int, ...]:
    """Reads a list of Linux: `0-3,8` is (0, 1, 2, 3, 8)."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def keep_triton_cache_here() -> None:
    """Has Triton keep compiled kernels on the node's own disk, in a SLURM job that does not say.

    Its default is the home folder, mostly one for all nodes, into which all ranks would compile at
    once. What lies in the folder is loaded as code, so it must be this user's.
    """
    if "SLURM_JOB_ID" not in os.environ or "TRITON_CACHE_DIR" in os.environ:
        return
    folder = Path(tempfile.gettempdir()) / f"cat_lm-triton-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        folder = Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))
    os.environ["TRITON_CACHE_DIR"] = str(folder)


def judge(verdict: PreflightReport) -> None:
    """Warn of what GPUs' ranks lack; ranks on CPUs take what there is."""
    first = verdict.facts[0]
    if first.on_gpu:
        verdict.notes.append(f"Triton's cache: {first.node.triton_cache}")
        _cores(verdict)
        _sockets(verdict)
        _locked_memory(verdict)


def _cores(verdict: PreflightReport) -> None:
    for ranks in _by_host(verdict.facts):
        together = len(set().union(*(fact.node.cores for fact in ranks)))
        for fact in ranks:
            own = min(len(fact.node.cores), together / len(ranks))
            if own < FEWEST_CORES:
                verdict.warnings[
                    f"{own:.3g} core{'s' if own > 1 else ''} for a GPU's rank, whose threads need "
                    f"{FEWEST_CORES} or more, or the GPU waits for them; ask for more: "
                    "--cpus-per-task of launch.slurm, srun and sbatch"
                ].append(fact.rank)


def _sockets(verdict: PreflightReport) -> None:
    """Memory of the other socket is reached through a link between them: some percent of a step."""
    anywhere = 0
    for fact in verdict.facts:
        cores, near = set(fact.node.cores), set(fact.node.near_cores)
        if near and not cores & near:
            verdict.warnings[
                "its cores are all on another socket than its GPU, which slows copies and launches;"
                " bind ranks to the cores beside their GPUs (srun --cpu-bind, --gpu-bind=closest)"
            ].append(fact.rank)
        anywhere += bool(near and not cores <= near)
    if anywhere:
        verdict.notes.append(
            f"sockets: {anywhere} of {len(verdict.facts)} ranks are not bound to the cores beside "
            "their GPU (srun --cpu-bind binds)"
        )


def _locked_memory(verdict: PreflightReport) -> None:
    """InfiniBand and its like send from and receive into memory that is locked for them."""
    if len({fact.host for fact in verdict.facts}) == 1:
        return
    for fact in verdict.facts:
        limit = fact.node.locked_memory
        if fact.node.has_rdma and limit is not None:
            verdict.warnings[
                f"only {limit // 1024:,} KiB of memory may be locked (ulimit -l), which NCCL needs "
                "to use the network between the nodes: it fails in ibv_reg_mr, or takes a slow "
                "path; ask for no limit (slurmd's LimitMEMLOCK=infinity)"
            ].append(fact.rank)


def _by_host(facts: Sequence[Facts]) -> list[list[Facts]]:
    found = defaultdict(list)
    for fact in facts:
        found[fact.host].append(fact)
    return list(found.values())
