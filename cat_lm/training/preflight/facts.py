"""The facts of one rank and its host, without collectives; what the user may fix is a fact too."""

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
from cat_lm.training.preflight.data import DataFacts
from cat_lm.training.watchdog import host_name

PACKAGES = ("torch", "deepspeed", "transformers", "numpy", "safetensors")
# A network file system may show a new file late, and a folder that was looked for before it was
# made later still: NFS asks the server again after 30 seconds.
PATIENCE_SECONDS = 40.0


class Problem(NamedTuple):
    """What is wrong, in one line; `passes` where it may be gone at the next start."""

    text: str
    passes: bool


@dataclass(frozen=True)
class Facts:
    """The facts that a rank gathers; `data` and `free_disk` on one rank of each host."""

    rank: int
    config: dict[str, Any]
    versions: dict[str, str]  # of what must be equal on all ranks
    on_gpu: bool
    free_memory: int  # bytes of its device; on a CPU, those that its host's ranks share
    gpu_memory: int  # all bytes of its GPU; 0 on a CPU
    host_memory: int  # free bytes of its host, whatever the device
    data: DataFacts | None = None
    free_disk: int | None = None  # bytes in the run's folder
    checkpoints: int = 0  # complete ones in it, up to those that the run keeps; on the first rank
    problems: list[Problem] = field(default_factory=list)  # with data, folder and kernels


@dataclass(frozen=True)
class Probe:
    """The run's folder, and the file that rank 0, on `host`, writes into it for all to see."""

    folder: Path
    token: str
    host: str

    @property
    def file(self) -> Path:
        return self.folder / f".preflight-{self.token}"

    def write(self) -> bool:
        """Make folder and file; a failure (False) is found again by `look`."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file.write_text(self.token, encoding="ascii")
            return True
        return False

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.file.unlink(missing_ok=True)

    def look(self, patience: float) -> int:
        """Return the bytes that are free in the folder, seen from this host.

        Rank 0's file may take `patience` seconds to be seen. Raises UserError where this host
        cannot write to the folder, or it is not rank 0's.
        """
        deadline = time.monotonic() + patience
        while not (is_seen := self.file.exists()) and time.monotonic() <= deadline:
            time.sleep(0.2)
            # Reading the folder makes a network file system ask the server again.
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
            if not existed:  # The folder is this host's own, or that of hosts like it.
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
    """Collect this rank's facts; also its host's with `opened` data and `probe`, if `written`."""
    problems: list[Problem] = []
    on_gpu = ranks.device.type == "cuda"
    if on_gpu:
        keep_triton_cache_here()

    def tried(action: Callable[[], Any], name: str = "") -> Any:
        try:
            return action()
        except Exception as error:
            problems.append(Problem(f"{name}{describe_error(error)}", is_temporary(error)))
            return None

    data = free_disk = None
    checkpoints = 0
    if probe is not None and opened is not None:
        data = tried(opened.result)
        # Where rank 0 could not write there is nothing to wait for.
        patience = PATIENCE_SECONDS if written and not ranks.is_first else 0
        where = f"train.output_dir={config.train.output_dir}: "
        free_disk = tried(lambda: probe.look(patience), where)
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
    """Count a run's complete checkpoints, whose space is taken already, up to `most`."""
    from cat_lm.training.checkpoint import is_complete, step_folders

    newest_first = reversed(step_folders(folder / "checkpoints"))
    return len(list(itertools.islice(filter(is_complete, newest_first), most)))


def kernel_problem(config: RunConfig, device: torch.device) -> str | None:
    """Launch a Triton kernel where the run may need them: it would fail in the first step."""
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
    """Launch the convolution of a few numbers on `device`; None where it runs and is right.

    At the first launch on each node Triton builds, in C and against Python's headers, what loads
    and starts a kernel. Returns what is wrong and what to do, in one line.
    """
    from cat_lm.ops.convolution.triton import convolve

    x = torch.arange(16.0, device=device).view(1, 16, 1, 1).expand(1, 16, 1, 16)
    try:
        found = convolve("head", x, torch.ones(1, 2, device=device), None, None)[0, :, 0, 0]
        wrong = found.tolist() != [0.0, *(float(2 * t - 1) for t in range(1, 16))]
    except Exception as error:  # of Triton, its compilers, the loader, the driver
        return (
            f"a Triton kernel does not run: {describe_error(error)}; on every node it needs a C "
            "compiler (gcc, or what CC names) and Python's headers (python3-dev)"
        )
    return "a Triton kernel runs and computes wrong numbers on this device" if wrong else None


def keep_triton_cache_here() -> None:
    """Keep Triton's compiled kernels on the node's own disk, in a SLURM job that does not say.

    The default is the home folder, mostly one for all nodes, into which all ranks would compile at
    once. The folder's content is loaded as code, so it must be this user's.
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
    """Return everything whose difference between ranks may change results or break collectives."""
    found = {"python": platform.python_version(), "cat_lm": __version__, "code": code_hash()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # such as a checkout on the path
            found[name] = "absent"
    found |= {f"the plugin {name}": code for name, code in plugins.describe().items()}
    found["CUDA"] = str(torch.version.cuda or torch.version.hip or "none")
    if on_gpu:
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        # Some images set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE: ten bits where fp32 has 23.
        is_exact = torch.get_float32_matmul_precision() == "highest"
        found["fp32 products"] = "exact" if is_exact else "TF32"
    return found


@functools.cache
def code_hash() -> str:
    """Hash the package's sources on this node: equal commits may have been edited."""
    package = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix in (".py", ".cpp", ".h"):
            digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def free_memory(device: torch.device) -> int:
    """Return the bytes that a process can still take: of the GPU, or of its job's host memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    known = available_memory()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") if known is None else known
