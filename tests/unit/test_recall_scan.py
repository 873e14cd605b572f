"""The scan of a decaying state against the recurrence as it reads, in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.mixers.modules.gla import gated_linear_attention
from cat_lm.mixers.modules.mamba import selective_scan
from cat_lm.ops.recurrence.decaying_scan import EVERY, decaying_scan

LENGTHS = [1, EVERY - 1, EVERY, 2 * EVERY + 3]


def mamba_loop(x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    state, rows = torch.zeros(len(x), *a.shape, dtype=x.dtype), []
    for t in range(x.shape[1]):
        step = delta[:, t, :, None]
        state = (step * a).exp() * state + step * x[:, t, :, None] * b[:, t, None]
        rows.append((state * c[:, t, None]).sum(dim=-1))
    return torch.stack(rows, dim=1)


def gla_loop(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    state, rows = 0.0, []
    for t in range(q.shape[1]):
        state = log_decay[:, t].exp()[..., None] * state + k[:, t, ..., None] * v[:, t, :, None]
        rows.append((q[:, t, ..., None] * state).sum(dim=-2) * q.shape[-1] ** -0.5)
    return torch.stack(rows, dim=1)


def mamba_inputs(time: int, *lead: int, spread: float = 1.0, dtype=torch.float64) -> list[Tensor]:
    x, delta = torch.randn(2, *lead, 2, time, 5, dtype=dtype)
    b, c = torch.randn(2, *lead, 2, time, 3, dtype=dtype)
    a = -16 * torch.rand(*lead, 5, 3, dtype=dtype)
    return [s.detach().requires_grad_() for s in (x, F.softplus(spread * delta), a, b, c)]


def gla_inputs(time: int, *lead: int, spread: float = 1.0, dtype=torch.float64) -> list[Tensor]:
    q, k, gate = torch.randn(3, *lead, 2, time, 2, 3, dtype=dtype)
    v = torch.randn(*lead, 2, time, 2, 4, dtype=dtype)
    return [s.detach().requires_grad_() for s in (q, k, v, F.logsigmoid(spread * gate))]


def one_state(time: int, *lead: int, **settings) -> list[Tensor]:
    """Mamba with one number of state: the rate has the state's shape, and nothing is summed."""
    x, delta, a, b, c = mamba_inputs(time, *lead, **settings)
    return [s.detach().requires_grad_() for s in (x, delta, *(s[..., :1] for s in (a, b, c)))]


def one_value(time: int, *lead: int, **settings) -> list[Tensor]:
    q, k, v, gate = gla_inputs(time, *lead, **settings)
    return [s.detach().requires_grad_() for s in (q, k, v[..., :1], gate)]


CASES = {
    "mamba": (selective_scan, mamba_loop, mamba_inputs),
    "mamba, one state": (selective_scan, mamba_loop, one_state),
    "gla": (gated_linear_attention, gla_loop, gla_inputs),
    "gla, one value": (gated_linear_attention, gla_loop, one_value),
}


def with_gradients(function, inputs: list[Tensor]) -> list[Tensor]:
    y = function(*inputs)
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)
    return [y, *torch.autograd.grad((y * weights).sum(), inputs)]


def same(found: list[Tensor], wanted: list[Tensor], **tolerance: float) -> None:
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        torch.testing.assert_close(one, other, msg=lambda m, i=index: f"{i}: {m}", **tolerance)


@pytest.mark.parametrize("time", LENGTHS)
@pytest.mark.parametrize("kind", CASES)
def test_scan_and_its_gradients_are_the_recurrences(kind, time):
    torch.manual_seed(time)
    scan, loop, inputs = CASES[kind]
    leaves = inputs(time)
    same(with_gradients(scan, leaves), with_gradients(loop, leaves))


@pytest.mark.parametrize("kind", CASES)
def test_decays_from_none_to_total_over_a_thousand_steps_stay_exact_in_fp32(kind):
    torch.manual_seed(0)
    scan, loop, inputs = CASES[kind]
    leaves = inputs(1030, spread=60.0)
    single = [s.detach().float().requires_grad_() for s in leaves]
    found, wanted = with_gradients(scan, single), with_gradients(loop, leaves)
    for one, other in zip(found, wanted, strict=True):
        assert one.isfinite().all()
        assert (one.double() - other).norm() < 2e-5 * other.norm()


@pytest.mark.parametrize("kind", CASES)
def test_stacked_models_scan_as_each_does_alone(kind):
    torch.manual_seed(0)
    scan, _, inputs = CASES[kind]
    stacked = [s.detach() for s in inputs(19, 3)]
    scored = torch.func.grad(lambda *s: scan(*s).square().sum(), tuple(range(len(stacked))))
    alone = [scored(*(s[m] for s in stacked)) for m in range(3)]
    wanted = [torch.stack(parts) for parts in zip(*alone, strict=True)]
    same(torch.func.vmap(scored)(*stacked), wanted)
    leaves = [s.requires_grad_() for s in stacked]
    torch.func.vmap(scan)(*leaves).square().sum().backward()
    same([s.grad for s in leaves], wanted)


def test_stacked_models_may_share_an_input():
    torch.manual_seed(0)
    x, delta, a, b, c = mamba_inputs(19)
    many = torch.stack([a.detach(), 2 * a.detach()]).requires_grad_()
    dimensions = (None, None, 2, None, None)
    y = torch.func.vmap(selective_scan, dimensions)(x, delta, many.movedim(0, 2), b, c)
    alone = torch.stack([selective_scan(x, delta, part, b, c) for part in many])
    leaves = (x, delta, many, b, c)
    found, wanted = (torch.autograd.grad(s.square().sum(), leaves) for s in (y, alone))
    same([y, *found], [alone, *wanted])


def test_a_second_derivative_is_refused():
    q = torch.randn(1, 3, 1, 2, requires_grad=True)
    one = torch.ones(1, 1, 1)
    y = decaying_scan(q, q, q, -q[..., None].square(), one)
    (first,) = torch.autograd.grad(y.square().sum(), q, create_graph=True)
    with pytest.raises((RuntimeError, NotImplementedError)):
        first.sum().backward()
