"""The device that is measured: which one, its names and settings, how fast it copies memory."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cat_lm.core.errors import UserError
from cat_lm.ops.runtime.cpu import make_process_ready
from cat_lm.pretrained.loading import choose_device
from eval.speed.timing import time_in_turn

# Larger than any cache, so that a copy of it runs at the speed of memory.
_LARGE_COPY_BYTES = {"cuda": 2**30, "cpu": 2**28}
_OPENMP_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND")
_OPENMP_VARIABLES += ("GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def open_device(name: str, threads: int | None) -> torch.device:
    """The device by its option's value, with `threads` CPU threads where that is given.

    A CPU's tensors keep their memory, as in training and evaluation: the system's clearing of pages
    would be timed else. As there, what is too small for a normal fp32 is 0.

    Raises `UserError` for a device that is absent or of a kind that is not measured.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    device = choose_device(name)
    if device.type not in _LARGE_COPY_BYTES:
        raise UserError(f"--device {name}: only CPUs and CUDA GPUs are measured")
    make_process_ready(device)
    return device


def describe(device: torch.device) -> dict[str, Any]:
    """The device and what around it decides a time."""
    settings = {name: os.environ[name] for name in _OPENMP_VARIABLES if name in os.environ}
    found: dict[str, Any] = {"type": device.type, "threads": torch.get_num_threads()}
    if device.type != "cuda":
        return {**found, "name": "cpu", "openmp": settings}
    properties = torch.cuda.get_device_properties(device)
    return {
        **found,
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_cache_bytes": getattr(properties, "L2_cache_size", None),
        "sm_clock_mhz": _sm_clock(device),
        "cuda": torch.version.cuda,
        "openmp": settings,
    }


def without_home(text: str) -> str:
    """`text` with `~` for this user's home, which is nobody else's business in a record."""
    return text.replace(str(Path.home()), "~")


def _sm_clock(device: torch.device) -> int | None:
    """MHz just now; None where the driver's library (nvidia-ml-py) cannot be asked."""
    try:
        return torch.cuda.clock_rate(device)
    except (ImportError, RuntimeError):
        return None


def copy_bandwidth(device: torch.device, sizes: list[int], repeats: int) -> dict[int, float]:
    """Time copies of tensors: bytes of a tensor to bytes a second, read and written.

    Measured for the sizes given and one larger than any cache. A tensor's own size is the fair
    ceiling where a cache holds it, the large one's where that is faster.
    """
    calls = {}
    for size in sorted({*sizes, _LARGE_COPY_BYTES[device.type]}):
        source = torch.empty(size, dtype=torch.uint8, device=device).random_()
        calls[size] = partial(torch.empty_like(source).copy_, source)
    timings = time_in_turn(calls, device, repeats, title="copy")
    return {size: 2 * size / timing.median for size, timing in timings.items()}


def resident_bytes(field: str) -> int:
    """Bytes of this process: `VmRSS`, what it has now, or `VmHWM`, the most since `forget_peak`.

    Raises:
        UserError: the system does not say.
    """
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise UserError(f"/proc/self/status has no {field}: memory cannot be measured on this system")


def forget_peak() -> None:
    """Make Linux forget the highest resident size so far."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
