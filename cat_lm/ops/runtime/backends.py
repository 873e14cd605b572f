"""The choice among the backends of an operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class BackendChoice(NamedTuple):
    """The name of the backend that serves an operator, and why this one."""

    name: str
    reason: str


def choose(
    operator: str,
    backend: str,
    device: torch.device,
    why_not: Callable[[str], str | None],
    fast: Sequence[str],
    slow: str,
) -> BackendChoice:
    """Choose the backend of an operator on a device.

    Args:
        operator: its name in messages.
        backend: auto, or the name of a backend that must serve.
        why_not: returns for a backend's name why it cannot run, as a clause, or None.
        fast: backends that `auto` tries on the device, the fastest first.
        slow: the backend that runs everywhere.

    Raises:
        ValueError: the backend asked for cannot serve.
    """
    if backend != "auto":
        obstacle = why_not(backend)
        if obstacle is not None:
            raise ValueError(f"backend={backend!r} cannot serve {operator}: {obstacle}")
        return BackendChoice(backend, "asked for by name")
    obstacles = []
    for name in fast:
        obstacle = why_not(name)
        if obstacle is None:
            reason = "; ".join(obstacles) or f"the fast path of {device.type} tensors"
            return BackendChoice(name, reason)
        obstacles.append(f"{name} cannot serve: {obstacle}")
    return BackendChoice(slow, "; ".join(obstacles) or "it serves every device")
