"""Hyena and H3 against sums and recurrences over time, in double precision."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cat_lm.mixers import Setting, make_mixer
from cat_lm.mixers.modules.long_convolution import long_convolution

LENGTHS = [1, 2, 7, 21]  # 21 is beyond the length and the states below
HYENA = "hyena:length=8,features=5,hidden=6"


def built(specification: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return make_mixer(specification).build(Setting(6)).double()


def summed(x: Tensor, filters: Tensor) -> Tensor:
    """Σ_{s≤t} f_{t−s} x_s for x and filters [T, …]."""
    rows = [sum(filters[t - s] * x[s] for s in range(t + 1)) for t in range(len(x))]
    return torch.stack(rows)


@pytest.mark.parametrize("time", LENGTHS)
def test_a_long_convolution_is_the_causal_sum(time):
    torch.manual_seed(time)
    x, filters = torch.randn(2, time, 3, 2).double(), torch.randn(time, 3, 1).double()
    wanted = torch.stack([summed(row, filters) for row in x])
    torch.testing.assert_close(long_convolution(x, filters), wanted)


@pytest.mark.parametrize("time", LENGTHS)
def test_hyena_is_its_sums_at_any_length(time):
    layer = built(HYENA)
    x = torch.randn(1, time, 6).double()
    streams = layer.in_proj(x)[0]
    taps = layer.short[0].T
    streams = layer.short_bias[0] + torch.stack(
        [sum(taps[j] * streams[t - j] for j in range(3) if t >= j) for t in range(time)]
    )
    after, before, v = streams.split(6, dim=-1)
    v = before * v
    wanted = layer.out_proj(after * (summed(v, layer.filters(time)) + layer.D * v))
    torch.testing.assert_close(layer(x)[0], wanted)


def test_hyenas_filter_is_a_decaying_function_of_time():
    layer = built(HYENA)
    found = layer.filters(21)
    torch.testing.assert_close(layer.filters(8), found[:8])
    for t in (0, 5, 20):
        waves = [2 * math.pi * t / 8 * f for f in (1e-4, 1.0)]
        z = [t / 7, *(math.cos(w) for w in waves), *(-math.sin(w) for w in waves)]
        for channel, rate in ((0, math.log(100) / 1.5), (5, math.log(100) / 0.3)):
            free = layer.network(torch.tensor(z).double())[channel]
            torch.testing.assert_close(
                found[t, channel], free * math.exp(-rate * t / 7), rtol=1e-5, atol=1e-9
            )
    of_sines = [name for name, _ in layer.network.named_parameters() if "frequency" in name]
    assert of_sines == ["sine.frequency"]  # one, after each of the three layers


@pytest.mark.parametrize("time", LENGTHS)
@pytest.mark.parametrize("head_dim", [1, 2, 3])
def test_h3_is_its_two_recurrences_at_any_length(head_dim, time):
    layer = built(f"h3:state=8,head_dim={head_dim}")
    with torch.no_grad():
        layer.shift.b += torch.randn_like(layer.shift.b)
    x = torch.randn(1, time, 6).double()
    a, b, c = layer.diagonal.discrete()
    heads = 6 // head_dim
    queue = torch.zeros(6, 8).double()
    state = torch.zeros(heads, head_dim, head_dim, 4, dtype=torch.complex128)
    rows = []
    for t in range(time):
        q, k, v = (p(x[0, t]) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        queue = torch.cat([torch.zeros(6, 1), queue[:, :-1]], dim=1) + layer.shift.b * k[:, None]
        k = (layer.shift.c * queue).sum(dim=1) + layer.shift.D * k
        q, k, v = (s.view(heads, head_dim) for s in (q, k, v))
        u = k[:, :, None] * v[:, None]
        state = a[:, None, None] * state + b[:, None, None] * u[..., None]
        y = 2 * (c[:, None, None] * state).sum(dim=-1).real
        y = y + layer.diagonal.D[:, None, None] * u
        rows.append(layer.output_linear((q[:, :, None] * y).sum(dim=1).flatten()))
    torch.testing.assert_close(layer(x)[0], torch.stack(rows))


def test_h3_starts_as_s4d_lin_with_bilinear_steps():
    layer = built("h3:state=8,head_dim=1")
    a, b, _ = layer.diagonal.discrete()
    dt = layer.diagonal.log_dt.exp()
    assert (dt >= 1e-3).all() and (dt <= 0.1).all()
    step = (-0.5 + 1j * math.pi * torch.arange(4)) * dt[:, None]
    torch.testing.assert_close(a, (1 + step / 2) / (1 - step / 2), check_dtype=False)
    torch.testing.assert_close(b, dt[:, None] / (1 - step / 2), check_dtype=False)
    torch.testing.assert_close(layer.shift.filters(20)[:8], layer.shift.c.T)
    assert not layer.shift.filters(20)[8:].any()
