"""What computes the recurrences of language models, by name, and why.

torch: plain torch, on any device. cpu: C++ kernels, fp32. triton: Triton kernels. fla: the chunked
Triton operators of flash-linear-attention, whose products are in bf16 (fla.py).
"""

from __future__ import annotations

import functools
import importlib.util
from typing import NamedTuple

import torch

from cat_lm.core.registry import one_of
from cat_lm.ops.recurrence import decaying_scan_cpu
from cat_lm.ops.runtime import triton_launch
from cat_lm.ops.runtime.backends import BackendChoice, choose

NAMES = ("torch", "cpu", "triton", "fla")
# Those that `auto` tries on a device, the fastest first; then torch.
_FAST = {"cpu": ("cpu",), "cuda": ("fla", "triton")}


class Recurrence(NamedTuple):
    """A recurrence: what it is called, and which backends know it."""

    title: str
    backends: tuple[str, ...]


SELECTIVE_SCAN = Recurrence("the selective scan", ("torch", "cpu", "triton"))
GLA = Recurrence("gated linear attention", ("torch", "cpu", "triton", "fla"))
DELTA_RULE = Recurrence("the delta rule", ("torch", "fla"))
GATED_DELTA_RULE = Recurrence("the gated delta rule", ("torch", "fla"))


def choose_backend(
    recurrence: Recurrence, device: torch.device | str, dtype: torch.dtype, backend: str = "auto"
) -> BackendChoice:
    """Choose what computes a recurrence.

    Args:
        device, dtype: where and in what its inputs are.
        backend: auto, or the name of a backend that must serve.

    Raises:
        ValueError: the name is unknown, or the backend asked for cannot serve.
    """
    device = torch.device(device)
    if backend not in (known := ("auto", *NAMES)):
        raise ValueError(f"backend={backend!r}: {one_of(backend, known)}")

    def why_not(name: str) -> str | None:
        return _why_not(recurrence, name, device, dtype)

    return choose(recurrence.title, backend, device, why_not, _FAST.get(device.type, ()), "torch")


def describe_backend(
    recurrence: Recurrence, device: torch.device | str, dtype: torch.dtype, backend: str = "auto"
) -> str:
    """Describe in one line what computes a recurrence, and why; as `choose_backend`."""
    choice = choose_backend(recurrence, device, dtype, backend)
    sums = "products in bf16, sums in fp32" if choice.name == "fla" else "in fp32"
    return f"{recurrence.title}: {choice.name}, {choice.reason}; {sums}"


@functools.cache
def _has_fla() -> bool:
    return importlib.util.find_spec("fla") is not None


def _why_not(
    recurrence: Recurrence, backend: str, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Return why a backend cannot serve; None if it can."""
    if backend not in recurrence.backends:
        return f"{recurrence.title} has {', '.join(recurrence.backends)}"
    if backend == "torch":
        return None
    if backend == "triton":
        return triton_launch.why_not(device, dtype)
    needed = "cpu" if backend == "cpu" else "cuda"
    if device.type != needed:
        return f"it computes {needed} tensors, not {device.type} tensors"
    if dtype == torch.float64:
        return "it has no fp64"
    if backend == "cpu":
        library = decaying_scan_cpu.KERNEL.library()
        return None if library.handle is not None else library.reason
    if not _has_fla():
        return "fla-core is not installed (pip install fla-core)"
    return None if dtype == torch.bfloat16 else "its chunked operators are for bf16"
