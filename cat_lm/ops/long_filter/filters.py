"""Kinds of long filters: the one table of what `conv_filter` may name beside `taps`.

A kind says how many numbers a head's filter is, how they start, and which decays they are. This
module does not import torch until it is asked for tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cat_lm.core.registry import Registry
from cat_lm.ops.convolution import kinds

if TYPE_CHECKING:
    from torch import Tensor

TAPS = "taps"
# Rates of decay that filters start with, evenly spread in the logarithm over heads and numbers:
# S4D's range of steps (Gu et al., 2022), there drawn.
RATES = (1e-3, 1e-1)


class Modes(NamedTuple):
    """F_j = now δ_j + sum_m e^{−j rate} (real cos(j angle) − imaginary sin(j angle)).

    Attributes:
        now: d [H].
        rate: [H, M], above 0.
        real: [H, M].
        angle, imaginary: [H, M]; None where nothing turns.
    """

    now: Tensor
    rate: Tensor
    real: Tensor
    angle: Tensor | None = None
    imaginary: Tensor | None = None


@dataclass(frozen=True)
class LongFilter:
    """A kind of long filter; N is `conv_state`, the numbers of state of a head and channel.

    Attributes:
        name: the value of `conv_filter`.
        meaning: what it is, in messages and tables.
        fixed: N to how many numbers of a head's filter stand before its N coefficients and d.
        problem: N to why there is no such filter; "" where there is.
        start: (heads, N) to the fixed numbers [H, fixed] as they start.
        paced: (N, tokens) to fixed numbers [fixed] whose first decay is e^{−1/tokens}.
        modes: ([H, fixed], coefficients [H, N], d [H]) to the filter that they are.
        usual_state: the N of a family's variants that are named by the filter alone.
    """

    name: str
    meaning: str
    fixed: Callable[[int], int]
    problem: Callable[[int], str]
    start: Callable[[int, int], Tensor]
    paced: Callable[[int, int], Tensor]
    modes: Callable[[Tensor, Tensor, Tensor], Modes]
    usual_state: int

    def numbers(self, state: int) -> int:
        """Count the learned numbers of a head's filter."""
        return self.fixed(state) + state + 1

    def identity(self, heads: int, state: int) -> Tensor:
        """Make the numbers [H, P] of filters that change nothing: coefficients 0, d = 1."""
        import torch

        coefficients = torch.zeros(heads, state)
        return torch.cat([self.start(heads, state), coefficients, torch.ones(heads, 1)], dim=1)

    def start_as(self, init: str, heads: int, state: int) -> Tensor:
        """Make the numbers [H, P] as they start: only what filters are sums of is drawn.

        Args:
            init: identity; uniform, coefficients and d from ±1/√N; or residual, both added.
        """
        import torch

        numbers = self.identity(heads, state)
        drawn, bound = numbers[:, -state - 1 :], state**-0.5
        if init == "uniform":
            drawn.uniform_(-bound, bound)
        elif init == "residual":
            drawn += torch.empty_like(drawn).uniform_(-bound, bound)
        return numbers

    def average(self, heads: int, state: int, tokens: int) -> Tensor:
        """Make the numbers [H, P] of F_j = e^{−j/tokens}, which sums to 1 over so many lags.

        The first decay alone is read; the others stand ready with coefficients 0.
        """
        import torch

        fixed = self.paced(state, tokens).expand(heads, -1)
        coefficients, now = torch.zeros(heads, state), torch.zeros(heads)
        coefficients[:, 0] = 1.0
        read = self.modes(fixed, coefficients, now).real[:, 0]
        coefficients[:, 0] = math.expm1(-1 / tokens) / math.expm1(-1) / read
        return torch.cat([fixed, coefficients, now[:, None]], dim=1)

    def modes_of(self, numbers: Tensor, state: int) -> Modes:
        """Compute the filters that numbers [H, P] are, in fp32 at least."""
        import torch

        numbers = numbers.to(torch.promote_types(numbers.dtype, torch.float32))
        fixed, coefficients, now = numbers.split([self.fixed(state), state, 1], dim=1)
        return self.modes(fixed, coefficients, now[:, 0])


def _log_spaced_rates(heads: int, count: int) -> Tensor:
    """Return rates [H, count], spaced evenly in the logarithm; a head's are adjacent."""
    import torch

    low, high = (math.log(rate) for rate in RATES)
    places = (torch.arange(heads * count) + 0.5) / (heads * count)
    return (low + (high - low) * places).exp().view(count, heads).T.contiguous()


def _within(logarithm: Tensor) -> Tensor:
    """Clamp a logarithm so that its power and square are finite."""
    return logarithm.clamp(-30, 30)


def _start_exponential(heads: int, state: int) -> Tensor:
    # σ(θ) = e^{−rate}
    return -_log_spaced_rates(heads, state).expm1().log()


def _paced_exponential(state: int, tokens: int) -> Tensor:
    """Build decays from one over `tokens` tokens to nearly one over a single token."""
    import torch

    rate = tokens ** (torch.arange(state) / state - 1)
    return -rate.expm1().log()


def _exponential(theta: Tensor, coefficients: Tensor, now: Tensor) -> Modes:
    """F_j = d δ_j + sum_n c_n sqrt(1 − ρ_n²) ρ_n^j with ρ = σ(θ).

    The root makes c² the energy of the filter whatever its length (Orvieto et al., 2023).
    """
    from torch.nn import functional as F

    rate = F.softplus(-_within(theta))
    return Modes(now, rate, coefficients * (-(-2 * rate).expm1()).sqrt())


def _start_ssm(heads: int, state: int) -> Tensor:
    """log −Re A = log ½, Im A = π m, and log Δ (S4D-Lin)."""
    import torch

    pairs = state // 2
    real = torch.full((heads, pairs), math.log(0.5))
    turning = (math.pi * torch.arange(pairs)).expand(heads, -1)
    return torch.cat([real, turning, _log_spaced_rates(heads, 1).log()], dim=1)


def _paced_ssm(state: int, tokens: int) -> Tensor:
    """Δ = 2 / tokens: pair m turns m times within them."""
    fixed = _start_ssm(1, state)[0]
    fixed[-1] = math.log(2 / tokens)
    return fixed


def _ssm(fixed: Tensor, coefficients: Tensor, now: Tensor) -> Modes:
    """F_j = d δ_j + 2 Re sum_m C_m (e^{ΔA_m} − 1)/A_m e^{jΔA_m}, A = −e^a + iω (S4D, eq. 5 and 9).

    The factor before the power is a held input's (zero-order hold), in real numbers.
    """
    pairs = coefficients.shape[1] // 2
    log_decay, turning, log_step = fixed.split([pairs, pairs, 1], dim=1)
    decay, step = _within(log_decay).exp(), _within(log_step).exp()
    rate, angle = step * decay, step * turning
    # e^{ΔA} − 1 without the cancellation of small steps.
    grown = (-rate).expm1() * angle.cos() - 2 * (angle / 2).sin() ** 2
    turned = (-rate).exp() * angle.sin()
    size = decay**2 + turning**2
    real = (-decay * grown + turning * turned) / size
    imaginary = (-decay * turned - turning * grown) / size
    c_real, c_imaginary = coefficients.split(pairs, dim=1)
    return Modes(
        now,
        rate,
        2 * (c_real * real - c_imaginary * imaginary),
        angle,
        2 * (c_real * imaginary + c_imaginary * real),
    )


def problems(
    name: str, state: int, conv_type: str, keys: tuple[str, str] = ("conv_filter", "conv_state")
) -> list[str]:
    """Return contradictions between a filter's name, its N and the kind of convolution.

    Args:
        keys: the names of the first two.
    """
    if name == TAPS:
        if state == 0:
            return []
        known = " or ".join(f"{keys[0]}={known}" for known in names())
        return [f"{keys[1]}={state}: says nothing with {keys[0]}={TAPS}; choose {known}"]
    named = f"{keys[0]}={name}"
    if not kinds.takes_long_filters(conv_type):
        able = [kind for kind in kinds.names() if kinds.takes_long_filters(kind)]
        return [f"{named}: needs conv_type={' or '.join(able)}, not conv_type={conv_type}"]
    if state < 1:
        return [
            f"{named}: needs {keys[1]}, its numbers of state for each channel, as in {keys[1]}=16"
        ]
    problem = get(name).problem(state)
    return [f"{keys[1]}={state}: {problem} ({named})"] if problem else []


_EXPONENTIAL = LongFilter(
    "exponential",
    "a sum of decays",
    fixed=lambda state: state,
    problem=lambda state: "",
    start=_start_exponential,
    paced=_paced_exponential,
    modes=_exponential,
    usual_state=1,
)
_SSM = LongFilter(
    "ssm",
    "a state-space model (S4D)",
    fixed=lambda state: state + 1,
    problem=lambda state: "must be even, a state of pairs" if state % 2 else "",
    start=_start_ssm,
    paced=_paced_ssm,
    modes=_ssm,
    usual_state=16,
)
FILTERS: Registry[LongFilter] = Registry(
    "conv_filter",
    LongFilter,
    words=("name", "meaning"),
    others=(TAPS,),
    entries=(_EXPONENTIAL, _SSM),
)
get, names, register = FILTERS.get, FILTERS.names, FILTERS.register
