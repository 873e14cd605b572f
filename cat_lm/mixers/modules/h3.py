"""H3's two state space models, as long convolutions, and its layer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.mixers.base import Setting
from cat_lm.mixers.modules.context import at_least_fp32, without_padding
from cat_lm.mixers.modules.long_convolution import long_convolution

if TYPE_CHECKING:
    from cat_lm.mixers import h3

FASTEST, SLOWEST = 0.1, 1e-3  # Δ at the start


class ShiftModel(nn.Module):
    """A filter as long as the state, [T, C]: f_t = Σ_j b_j c_{j+t}."""

    no_decay = ("b", "c", "D")

    def __init__(self, width: int, state: int) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.eye(1, state).repeat(width, 1))
        bound = 1 / math.sqrt(state)
        self.c = nn.Parameter(torch.empty(width, state).uniform_(-bound, bound))
        self.D = nn.Parameter(torch.randn(width))

    def filters(self, time: int) -> Tensor:
        state = self.b.shape[1]
        b, c = (torch.fft.rfft(at_least_fp32(s), n=2 * state) for s in (self.b, self.c))
        spectra = b.conj() * c
        taps = torch.fft.irfft(spectra, n=2 * state)[:, : min(state, time)]
        return F.pad(taps, (0, time - taps.shape[1])).T


class DiagonalModel(nn.Module):
    """A filter of any length, [T, H]: f_t = 2 Re Σ_n C_n Ā_n^t B̄_n."""

    no_decay = ("log_dt", "log_decay", "frequency", "B", "C", "D")

    def __init__(self, heads: int, state: int) -> None:
        super().__init__()
        half = state // 2
        spread = torch.rand(heads) * math.log(FASTEST / SLOWEST)
        self.log_dt = nn.Parameter(math.log(SLOWEST) + spread)
        self.log_decay = nn.Parameter(torch.full((heads, half), math.log(0.5)))
        self.frequency = nn.Parameter(math.pi * torch.arange(half).float().repeat(heads, 1))
        self.B = nn.Parameter(torch.tensor([1.0, 0.0]).repeat(heads, half, 1))
        self.C = nn.Parameter(torch.randn(heads, half, 2) / math.sqrt(2))
        self.D = nn.Parameter(torch.randn(heads))

    def discrete(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ā, B̄ and C, complex [H, N/2]."""
        dt = at_least_fp32(self.log_dt).exp()[:, None]
        decay, frequency = at_least_fp32(self.log_decay).exp(), at_least_fp32(self.frequency)
        half_step = torch.complex(-decay, frequency) * dt / 2
        below = 1 - half_step
        b, c = (torch.complex(*at_least_fp32(s).unbind(dim=-1)) for s in (self.B, self.C))
        return (1 + half_step) / below, b * dt / below, c

    def filters(self, time: int) -> Tensor:
        a, b, c = self.discrete()
        steps = torch.arange(time, device=a.device)[:, None, None]
        return 2 * (b * c * (steps * a.log()).exp()).sum(dim=-1).real


class H3(nn.Module):
    """One H3 layer."""

    def __init__(self, options: h3.Options, setting: Setting) -> None:
        super().__init__()
        width, self.head_dim = setting.d_model, options.head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.shift = ShiftModel(width, options.state)
        self.diagonal = DiagonalModel(width // options.head_dim, options.state)
        self.output_linear = nn.Linear(width, width)

    def forward(self, x: Tensor, *, padding_mask: Tensor | None = None) -> Tensor:
        time, k = x.shape[1], without_padding(self.k_proj(x), padding_mask)
        k = long_convolution(k, self.shift.filters(time)) + self.shift.D * k
        q, k, v = (
            s.unflatten(-1, (-1, self.head_dim)) for s in (self.q_proj(x), k, self.v_proj(x))
        )
        pairs = without_padding(k[..., :, None] * v[..., None, :], padding_mask)
        moved = long_convolution(pairs, self.diagonal.filters(time)[..., None, None])
        moved = moved + self.diagonal.D[:, None, None] * pairs
        return self.output_linear((q[..., :, None] * moved).sum(dim=-2).flatten(2))
