"""Long filters of random numbers, their sums by loops over taps, and comparisons with those."""

from __future__ import annotations

import math

import torch

from cat_lm.ops.long_filter import filters

KINDS = {"exponential": 3, "ssm": 6}


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


def taps_by_definition(kind: str, numbers: torch.Tensor, length: int) -> torch.Tensor:
    """F_j [H, length] as the definitions read, in complex numbers."""
    state = KINDS[kind]
    found = torch.zeros(len(numbers), length, dtype=torch.complex128)
    for head, own in enumerate(numbers.detach()):
        for j in range(length):
            if kind == "exponential":
                theta, c = own[:state], own[state : 2 * state]
                rho = torch.sigmoid(theta)
                value = (c * (1 - rho**2).sqrt() * rho**j).sum() + 0j
            else:
                pairs = state // 2
                a = torch.complex(-own[:pairs].exp(), own[pairs:state])
                step = own[state].exp()
                c = torch.complex(own[state + 1 : -1][:pairs], own[state + 1 : -1][pairs:])
                value = 2 * (c * ((step * a).exp() - 1) / a * (j * step * a).exp()).sum().real
            found[head, j] = value + (own[-1] if j == 0 else 0)
    return found.real


def by_loops(x: torch.Tensor, taps: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """y[b,t,h] = sum_j F[h,j] x[b,t−j,h] while the ids are those of t."""
    y = torch.zeros_like(x)
    for row in range(x.shape[0]):
        for t in range(x.shape[1]):
            for j in range(t + 1):
                if ids is not None and ids[row, t - j] != ids[row, t]:
                    break
                y[row, t] += taps[:, j, None] * x[row, t - j]
    return y
