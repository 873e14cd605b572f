"""Compute in the dtype of the tensors, whatever autocast would take."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """Turn autocast off where x lies: it would round the factors of a product to half precision."""
    device = x.device.type
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()
