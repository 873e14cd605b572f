"""What a node gives a rank beside its device: cores, limits, and where Triton keeps kernels."""

from __future__ import annotations

import os
import resource
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

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
