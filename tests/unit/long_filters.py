"""Long filters of random numbers."""

from __future__ import annotations

import math

import torch

from cat_lm.ops.long_filter import filters


def random_numbers(kind: str, heads: int, state: int, dtype=torch.float64) -> torch.Tensor:
    """Filters that turn and fade within some 20 tokens."""
    numbers = filters.get(kind).identity(heads, state).to(dtype)
    own = torch.randn(numbers.shape, dtype=dtype)
    numbers[:, -state - 1 :] = own[:, -state - 1 :]
    if kind == "exponential":
        numbers[:, :state] = 1.5 + own[:, :state]
    else:
        numbers[:, : -state - 1] += 0.3 * own[:, : -state - 1]
        numbers[:, state] = math.log(0.2)
    return numbers
