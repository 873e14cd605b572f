"""Collect the facts about one rank and its host, and their problems, without collectives."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import platform
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cat_lm.config import RunConfig
from cat_lm.core import __version__, plugins
from cat_lm.core.errors import UserError, describe_os_error, file_error, is_temporary
from cat_lm.core.host import available_memory
from cat_lm.ops.runtime.triton_launch import INSTALLED
from cat_lm.training.distributed import Ranks, describe_error
from cat_lm.training.preflight.data import OpenedData
from cat_lm.training.watchdog import host_name

PACKAGES = ("torch", "deepspeed", "transformers", "numpy", "safetensors")
# A network file system may show a new file late: NFS asks the server again only 30 seconds after it
# found no such folder.
PATIENCE_SECONDS = 40.0


class Problem(NamedTuple):
    """A problem as one line; `passes` is True if it may be gone at the next launch."""

    text: str
    passes: bool


@dataclass(frozen=True)
class Facts:
    """The facts about a rank; only one rank per host has `data` and `free_disk`."""

    rank: int
    config: dict[str, Any]
    versions: dict[str, str]  # versions of everything that must be equal on all ranks
    on_gpu: bool
    free_memory: int  # free bytes of the device; on a CPU, the ranks of the host share them
    gpu_memory: int  # total bytes of the GPU; 0 on a CPU
    host_memory: int  # free bytes of the host
    data: OpenedData | None = None
    free_disk: int | None = None  # free bytes where the run's folder is
    checkpoints: int = 0  # complete ones there, at most checkpoint.keep_last; on rank 0 only
    problems: list[Problem] = field(default_factory=list)  # problems of data, folder and kernels


@dataclass(frozen=True)
class Probe:
    """A file that rank 0, on `host`, writes into the run's folder, for other hosts to look for."""

    folder: Path
    token: str
    host: str

    @property
    def file(self) -> Path:
        return self.folder / f".preflight-{self.token}"

    def write(self) -> bool:
        """Make the folder and the file; return False on failure, which `look` will report."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file.write_text(self.token, encoding="ascii")
            return True
        return False

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.file.unlink(missing_ok=True)

    def look(self, patience: float) -> int:
        """Return the free bytes in the folder, as this host sees it.

        Wait up to `patience` seconds for rank 0's file. Raises UserError if this host cannot write
        to the folder, or sees another folder than rank 0.
        """
        deadline = time.monotonic() + patience
        while not (is_seen := self.file.exists()) and time.monotonic() <= deadline:
            time.sleep(0.2)
            # Listing the folder makes a network file system ask the server again.
            for folder in (self.folder.parent, self.folder):
                if folder.is_dir():
                    os.listdir(folder)
        own = self.file.with_name(f"{self.file.name}-{host_name()}-{os.getpid()}")
        existed = os.path.exists(self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)  # Its error names what is in the way.
            try:
                own.write_text(self.token, encoding="ascii")
            finally:
                own.unlink(missing_ok=True)
        except OSError as error:
            where = error.filename or self.folder
            text = f"cannot be written to: {where}: {describe_os_error(error)}"
            raise file_error(text, error) from None
        if not is_seen:
            if not existed:  # It was made here, and not by rank 0.
                with contextlib.suppress(OSError):
                    os.rmdir(self.folder)
            raise UserError(
                f"is not the folder that rank 0 writes to on {self.host}; "
                "choose one on a file system that all nodes share"
            )
        return shutil.disk_usage(self.folder).free


def collect(
    config: RunConfig, ranks: Ranks, opened: Future | None, probe: Probe | None, written: bool
) -> Facts:
    """Return the facts about this rank, and those about its host if `opened` and `probe` are given.

    Args:
        opened: the finished future of `read_data`.
        probe: the file to look for; `written` is False if rank 0 could not write it.
    """
    problems: list[Problem] = []
    on_gpu = ranks.device.type == "cuda"
    if on_gpu:
        use_local_triton_cache()

    def collect_problem(action: Callable[[], Any], name: str = "") -> Any:
        try:
            return action()
        except Exception as error:
            problems.append(Problem(f"{name}{describe_error(error)}", is_temporary(error)))
            return None

    data = free_disk = None
    checkpoints = 0
    if probe is not None and opened is not None:
        data = collect_problem(opened.result)
        # If rank 0 could not write the file, do not wait for it.
        patience = PATIENCE_SECONDS if written and not ranks.is_first else 0
        where = f"train.output_dir={config.train.output_dir}: "
        free_disk = collect_problem(lambda: probe.look(patience), where)
        if ranks.is_first and free_disk is not None:
            checkpoints = saved_checkpoints(probe.folder, config.checkpoint.keep_last)
    if problem := kernel_problem(config, ranks.device):
        problems.append(Problem(problem, False))
    return Facts(
        rank=ranks.rank,
        config=config.model_dump(mode="json"),
        versions=versions(on_gpu),
        on_gpu=on_gpu,
        free_memory=free_memory(ranks.device),
        gpu_memory=torch.cuda.mem_get_info(ranks.device)[1] if on_gpu else 0,
        host_memory=free_memory(torch.device("cpu")),
        data=data,
        free_disk=free_disk,
        checkpoints=checkpoints,
        problems=problems,
    )


def saved_checkpoints(folder: Path, most: int) -> int:
    """Return the number of a run's complete checkpoints, at most `most`."""
    from cat_lm.training.checkpoint import is_complete, step_folders

    newest_first = reversed(step_folders(folder / "checkpoints"))
    return len(list(itertools.islice(filter(is_complete, newest_first), most)))


def kernel_problem(config: RunConfig, device: torch.device) -> str | None:
    """Return why Triton kernels, which the run may need, do not work here; None if they do."""
    train, recurrent = config.train, config.architecture.recurrent
    asked = train.conv_backend != "reference" or train.compile
    asked = asked or (recurrent and train.mixer_backend != "torch")
    if not (asked and INSTALLED and device.type == "cuda"):
        return None
    problem = why_no_kernel(device)
    return problem and (
        f"{problem} (train.conv_backend=reference and train.compile=false do without them, slowly; "
        "of a recurrent model train.mixer_backend=torch, too)"
    )


def why_no_kernel(device: torch.device) -> str | None:
    """Return the problem and a remedy if a small Triton convolution fails on `device`, or None.

    At the first launch on each node Triton compiles a C extension that launches kernels, for which
    it needs Python's headers.
    """
    from cat_lm.ops.convolution.triton import convolve

    x = torch.arange(16.0, device=device).view(1, 16, 1, 1).expand(1, 16, 1, 16)
    try:
        found = convolve("head", x, torch.ones(1, 2, device=device), None, None)[0, :, 0, 0]
        wrong = found.tolist() != [0.0, *(float(2 * t - 1) for t in range(1, 16))]
    except Exception as error:  # Triton, its compilers, the loader or the driver has failed.
        return (
            f"a Triton kernel does not run: {describe_error(error)}; on every node it needs a C "
            "compiler (gcc, or what CC names) and Python's headers (python3-dev)"
        )
    return "a Triton kernel runs and computes wrong numbers on this device" if wrong else None


def use_local_triton_cache() -> None:
    """In a SLURM job without TRITON_CACHE_DIR, move Triton's cache to the node's local disk.

    The default is the home folder, often shared by all nodes, to which all ranks would compile at
    the same time. The folder must belong to this user, because its content is loaded as code.
    """
    if "SLURM_JOB_ID" not in os.environ or "TRITON_CACHE_DIR" in os.environ:
        return
    folder = Path(tempfile.gettempdir()) / f"cat_lm-triton-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        folder = Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))
    os.environ["TRITON_CACHE_DIR"] = str(folder)


def versions(on_gpu: bool) -> dict[str, str]:
    """Return the versions of everything that must be equal on all ranks."""
    found = {"python": platform.python_version(), "cat_lm": __version__, "code": code_hash()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # It may be a checkout on the path.
            found[name] = "absent"
    found |= {f"the plugin {name}": code for name, code in plugins.describe().items()}
    found["CUDA"] = str(torch.version.cuda or torch.version.hip or "none")
    if on_gpu:
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        # Some images set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which reduces 23 bits of fp32 to 10.
        is_exact = torch.get_float32_matmul_precision() == "highest"
        found["fp32 products"] = "exact" if is_exact else "TF32"
    return found


@functools.cache
def code_hash() -> str:
    """Return a hash of the package's sources on this node, which may have been edited."""
    package = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix in (".py", ".cpp", ".h"):
            digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a GPU, or of the host memory that this job may still allocate."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    known = available_memory()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") if known is None else known
