"""Context managers and dtypes that keep sums of products in fp32."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def at_least_fp32(x: Tensor) -> torch.dtype:
    """Return the dtype in which numbers of x are summed: its own, and no less than fp32."""
    return torch.promote_types(x.dtype, torch.float32)


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """Turn autocast off on x's device: it would round factors to half precision."""
    device = x.device.type
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def sum_products_in_fp32() -> None:
    """Make half-precision products sum in fp32 on a GPU, for the rest of the process.

    torch lets cuBLAS divide a long sum among programs and round each one's part before it adds
    them (`allow_bf16_reduced_precision_reduction`, on by default).
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
