"""Fake tensors, which have shapes and no numbers: what a model needs is counted with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch._subclasses import fake_tensor

__all__ = ["computing_device", "is_fake", "standing_for_gpu"]

_FOR_GPU: ContextVar[bool] = ContextVar("fake tensors stand for those of a GPU", default=False)


@contextmanager
def standing_for_gpu(is_so: bool = True) -> Iterator[None]:
    """Make fake tensors on the CPU stand for a GPU's, which torch may not know here."""
    before = _FOR_GPU.set(is_so)
    try:
        yield
    finally:
        _FOR_GPU.reset(before)


def is_fake(x: Tensor) -> bool:
    """Return True if x has a shape alone; False in a graph that is compiled."""
    return not torch.compiler.is_compiling() and fake_tensor.is_fake(x)


def computing_device(x: Tensor) -> torch.device:
    """Return the device that computes x, or that x stands for."""
    return torch.device("cuda") if is_fake(x) and _FOR_GPU.get() else x.device
