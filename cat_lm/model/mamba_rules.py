"""What goes together in Mamba and Mamba-2; their sections and configurations ask here.

Imports no torch.
"""

from __future__ import annotations

import math
from typing import Any


def inner_size(model: Any) -> int:
    """Return I, the channels inside a layer; `model` is a section or configuration."""
    return model.expand * model.hidden_size


def usual_rank(hidden_size: int) -> int:
    """Return the rank of Mamba's step sizes that `auto` stands for."""
    return math.ceil(hidden_size / 16)


def step_problems(model: Any) -> list[str]:
    """Return whether the step sizes at the start are a range."""
    low, high = model.time_step_min, model.time_step_max
    if low <= high:
        return []
    return [f"time_step_min={low:g}: must be at most time_step_max={high:g}"]


def limit_problems(model: Any) -> list[str]:
    """Return whether Mamba-2's bounds of all step sizes are a range."""
    limit = model.time_step_limit
    if limit is None:
        return []
    are_numbers = isinstance(limit, list | tuple) and all(
        isinstance(n, int | float) and not isinstance(n, bool) for n in limit
    )
    if are_numbers and len(limit) == 2 and 0 <= limit[0] < limit[1]:
        return []
    return [f"time_step_limit={limit!r}: must be two numbers from 0 up, the lower one first"]


def state_head_problems(model: Any, heads: int) -> list[str]:
    """Return whether Mamba-2's heads fill the inner channels and divide among its groups."""
    inner = inner_size(model)
    if heads * model.head_dim != inner:
        return [
            f"head_dim={model.head_dim}: {heads} heads of so many channels are not "
            f"expand x hidden_size = {inner}"
        ]
    if heads % model.n_groups:
        return [f"n_groups={model.n_groups}: must divide the {heads} heads"]
    return []
