"""The facts of one rank's host. No collectives, and nothing raises: a failure is a fact too."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from cat_lm.config import RunConfig
from cat_lm.core import __version__, plugins
from cat_lm.core.errors import UserError, is_temporary
from cat_lm.core.host import available_memory
from cat_lm.ops.runtime.triton_launch import INSTALLED
from cat_lm.training.distributed import Ranks, describe_error
from cat_lm.training.preflight import node
from cat_lm.training.preflight.folder import FolderFacts, Probe
from cat_lm.training.watchdog import host_name

PACKAGES = ("torch", "deepspeed", "transformers", "numpy", "safetensors")


@dataclass(frozen=True)
class DataFacts:
    """The data as a node opened them; `probe` is a hash of some windows that were really read."""

    fingerprint: str
    probe: str
    vocab_size: int


@dataclass(frozen=True)
class Facts:
    """The facts that a rank gathers.

    Attributes:
        config: the run's configuration as this rank has it.
        versions: name to version of what must be equal on all ranks.
        device, driver: names; they may differ, but should not.
        free_memory: bytes that are free on its device; on a CPU, those that its host's ranks share.
        gpu_memory: all bytes of its GPU; 0 on a CPU.
        host_memory: bytes that are free on its host, whatever the device.
        matmul_seconds: of a small matrix product, to tell a slow device from the others.
        node: its share of its node: cores, limits.
        data: None where another rank of the host opened them, or where `data_problem` says why,
            and `data_may_come` that it may pass.
        folder: None where another rank of the host looked.
        kernel_problem: why a Triton kernel does not run here, where the run needs some.
    """

    rank: int
    host: str
    config: dict[str, Any]
    versions: dict[str, str]
    device: str
    on_gpu: bool
    driver: str
    free_memory: int
    gpu_memory: int
    host_memory: int
    matmul_seconds: float
    node: node.NodeFacts
    data: DataFacts | None = None
    data_problem: str | None = None
    data_may_come: bool = False
    folder: FolderFacts | None = None
    kernel_problem: str | None = None


def collect(
    config: RunConfig,
    ranks: Ranks,
    probe: Probe | None,
    written: bool,
    failed: BaseException | None = None,
) -> Facts:
    """This rank's facts; with `probe`, which was `written` or not, also those of its host.

    Args:
        failed: what was wrong when the data were packed; they are not tried again.
    """
    data = data_problem = folder = None
    data_may_come = False
    if probe is not None:
        data, data_problem, data_may_come = _tried(lambda: read_data(config), failed)
        folder = probe.look(ranks.is_first, written, config.checkpoint.keep_last)
    on_gpu = ranks.device.type == "cuda"
    return Facts(
        rank=ranks.rank,
        host=host_name(),
        config=config.model_dump(mode="json"),
        versions=versions(on_gpu),
        device=torch.cuda.get_device_name(ranks.device) if on_gpu else "CPU",
        on_gpu=on_gpu,
        driver=driver() if on_gpu else "",
        free_memory=free_memory(ranks.device),
        gpu_memory=torch.cuda.mem_get_info(ranks.device)[1] if on_gpu else 0,
        host_memory=free_memory(torch.device("cpu")),
        matmul_seconds=matmul_seconds(ranks.device),
        node=node.collect(ranks.device),
        data=data,
        data_problem=data_problem,
        data_may_come=data_may_come,
        folder=folder,
        kernel_problem=kernel_problem(config, ranks.device),
    )


def kernel_problem(config: RunConfig, device: torch.device) -> str | None:
    """Launches a Triton kernel where the run may need them: it would fail in the first step."""
    train, recurrent = config.train, config.architecture.recurrent
    asked = train.conv_backend != "reference" or train.compile
    asked = asked or (recurrent and train.mixer_backend != "torch")
    if not (asked and INSTALLED and device.type == "cuda"):
        return None
    from cat_lm.training.preflight.kernel_trial import why_no_kernel

    return why_no_kernel(device)


def _tried(action: Callable[[], Any], failed: BaseException | None) -> tuple[Any, str | None, bool]:
    """(the result, None, False), or (None, what was wrong, whether it may pass)."""
    try:
        if failed is not None:
            raise failed
        return action(), None, False
    except UserError as error:
        return None, str(error), is_temporary(error)
    except Exception as error:
        return None, describe_error(error), is_temporary(error)


def versions(on_gpu: bool) -> dict[str, str]:
    """Everything whose difference between ranks may change results or break collectives."""
    found = {"python": platform.python_version(), "cat_lm": __version__, "code": code_hash()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    found |= {f"the plugin {name}": code for name, code in plugins.describe().items()}
    found["CUDA"] = str(torch.version.cuda or torch.version.hip or "none")
    if on_gpu:
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["fp32 products"] = fp32_products()
    return found


def fp32_products() -> str:
    """Return how a GPU multiplies fp32: exactly, or in TF32, which has ten bits where fp32 has 23.

    Images of NVIDIA's set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which nobody sees.
    """
    return "exact" if torch.get_float32_matmul_precision() == "highest" else "TF32"


@functools.cache
def code_hash() -> str:
    """Hash the package's sources on this node: equal commits may have been edited."""
    package = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix in (".py", ".cpp", ".h"):
            digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def driver() -> str:
    """The NVIDIA kernel driver's version, or nothing."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    match = re.search(r"\d+\.\d+(?:\.\d+)?", text)
    return match[0] if match else ""


def read_data(config: RunConfig) -> DataFacts:
    """Opens both splits, and reads the first sample of the first, middle and last step."""
    from cat_lm.data.opening import open_data

    corpus, _, loader = open_data(config)
    digest, last = hashlib.sha256(), config.total_steps - 1
    for step in sorted({0, last // 2, last}):
        # With a rank for every sample of a step, the first one reads one sample.
        batch = loader.batch(step, 0, config.train.global_batch_size)
        digest.update(batch["input_ids"].tobytes() + batch["labels"].tobytes())
    return DataFacts(corpus.fingerprint, digest.hexdigest(), corpus.vocab_size)


def free_memory(device: torch.device) -> int:
    """Bytes that a process can still take: of the GPU, or of the host within this job's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    known = available_memory()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") if known is None else known


def matmul_seconds(device: torch.device) -> float:
    """The best of several small matrix products: milliseconds, enough to see a throttled device."""
    on_gpu = device.type == "cuda"
    size, dtype = (4096, torch.bfloat16) if on_gpu else (256, torch.float32)
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(6):
        start = time.perf_counter()
        result = matrix @ matrix
        if on_gpu:
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    del matrix, result
    if on_gpu:
        torch.cuda.empty_cache()
    return best
