"""Whether Triton can be used here, and what every launch of a kernel needs."""

from __future__ import annotations

import contextlib
import importlib.util

import torch
from torch import Tensor

INSTALLED = importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """Return True if kernels run in Triton's interpreter: decided when they were decorated."""
    if not INSTALLED:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


# For the whole process.
INTERPRETED = is_interpreted()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why no kernel takes tensors of this device and dtype; None if they do."""
    if not INSTALLED:
        return "triton is not installed"
    if device.type != "cuda" and not (device.type == "cpu" and INTERPRETED):
        return f"Triton's kernels need a GPU, and the inputs are on {device.type}"
    if dtype not in DTYPES:
        return f"Triton's kernels sum in fp32, which is too coarse for {dtype}"
    return None


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up; triton's own function takes several times as long on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n; 1 for n below 1."""
    return 1 << max(0, n - 1).bit_length()


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager:
    """Make x's device the current one: Triton launches there."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def unit_stride(x: Tensor) -> Tensor:
    """Copy x if its last dimension is not contiguous: kernels take all other strides."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def contiguous(x: Tensor | None) -> Tensor | None:
    """Make a tensor contiguous, where there is one."""
    return None if x is None else x.contiguous()
