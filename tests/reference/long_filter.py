"""Filters as long as the text by their definitions, in complex numbers and double precision."""

from __future__ import annotations

import torch
from torch import Tensor


def exponential(numbers: Tensor, state: int, lag: int) -> Tensor:
    """Return Σ_n c_n sqrt(1 − ρ_n²) ρ_n^j with ρ = σ(θ) (Orvieto et al., 2023)."""
    rho, coefficients = torch.sigmoid(numbers[:state]), numbers[state : 2 * state]
    return (coefficients * (1 - rho**2).sqrt() * rho**lag).sum()


def ssm(numbers: Tensor, state: int, lag: int) -> Tensor:
    """Return 2 Re Σ_m C_m (e^{ΔA_m} − 1)/A_m e^{jΔA_m} with A = −e^a + iω (S4D, eq. 5 and 9)."""
    pairs = state // 2
    decay, turning, step = numbers[:pairs], numbers[pairs:state], numbers[state].exp()
    c = torch.complex(numbers[state + 1 : state + 1 + pairs], numbers[state + 1 + pairs : -1])
    a = torch.complex(-decay.exp(), turning)
    return 2 * (c * ((step * a).exp() - 1) / a * (lag * step * a).exp()).sum().real


TAPS = {"exponential": exponential, "ssm": ssm}


def long_taps(name: str, numbers: Tensor, state: int, length: int) -> Tensor:
    """Return the first taps [H, length] of filters of numbers [H, P]; the last is d of lag 0."""
    rows = []
    for own in numbers:
        taps = [TAPS[name](own, state, lag) for lag in range(length)]
        rows.append(torch.stack([taps[0] + own[-1], *taps[1:]]))
    return torch.stack(rows)
