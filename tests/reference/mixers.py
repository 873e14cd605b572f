"""Every mixer of one row x [T, C] by loops over tokens, from its paper's recurrence."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.reference import attention as parts
from tests.reference import long_filter, multi_token, recurrences
from tests.reference.transformer import Weights, linear

Options = dict[str, Any]
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


def rms(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def silu(x: Tensor) -> Tensor:
    return x * x.sigmoid()


def softplus(x: Tensor) -> Tensor:
    return torch.log1p(x.exp())


def filtered(x: Tensor, weights: Weights, name: str = "conv1d") -> Tensor:
    """Return SiLU of the depthwise convolution of x [T, C]; the library's taps are oldest first."""
    taps = weights[f"{name}.weight"][:, 0]
    y = torch.zeros_like(x)
    for t in range(len(x)):
        for lag in range(min(taps.shape[1], t + 1)):
            y[t] += taps[:, -1 - lag] * x[t - lag]
    return silu(y + weights.get(f"{name}.bias", 0))


def projected(x: Tensor, weights: Weights, heads: int) -> list[Tensor]:
    """Return q, k and v [T, H, D], convolved where there are filters."""
    found = []
    for name in "qkv":
        y = linear(x, weights, f"{name}_proj")
        if f"{name}_conv1d.weight" in weights:
            y = filtered(y, weights, f"{name}_conv1d")
        found.append(y.view(len(x), heads, -1))
    return found


def decayed_recurrence(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """Return GLA's outputs, with q / sqrt(K), of tensors [T, H, ·] and decays of keys [T, H, K]."""
    one = decay.new_ones(1, 1, 1)
    given = (q[None] / math.sqrt(q.shape[2]), k[None], v[None], decay.log()[None, ..., None])
    return recurrences.decaying_scan(*given, one)[0][0]


def delta_rule(q: Tensor, k: Tensor, v: Tensor, rate: Tensor, decay: Tensor) -> Tensor:
    """Return the gated delta rule's outputs of tensors [T, H, ·], rates and decays [T, H]."""
    given = (x[None] for x in (q, k, v, rate, decay.log()))
    return recurrences.delta_rule(*given)[0][0]


def selective_scan(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return C_t h_t, h_t = e^{Δ_t A} h_{t−1} + Δ_t B_t u_t, of u, Δ [T, I], A [I, N] (Mamba)."""
    rows, state = [], torch.zeros_like(a)
    for t in range(len(u)):
        state = (delta[t][:, None] * a).exp() * state + (delta[t] * u[t])[:, None] * b[t]
        rows.append(state @ c[t])
    return torch.stack(rows)


def weighted(scores: Tensor, value: Tensor) -> Tensor:
    """Return Σ_s w_ts v_s / Σ_s w_ts over s ≤ t, of w [H, T, T] and v [T, H, D]."""
    scores = scores.tril()
    return torch.einsum("hts,shd->thd", scores / scores.sum(-1, keepdim=True), value)


def streams(x: Tensor, weights: Weights, options: Options) -> list[Tensor]:
    """Return q, k and v [T, H, D], filtered after the projection or before it."""
    width, heads = x.shape[1], options["heads"]
    own = weights["streams.projection.weight"]
    bias = weights.get("streams.projection.bias")
    bias = own.new_zeros(len(own)) if bias is None else bias
    found = []
    for index, name in enumerate("qkv"):
        place = min(index, len(own) // width - 1)  # keys and values may be one projection
        span = slice(place * width, (place + 1) * width)
        taps = taps_of(name, weights, options, len(x))
        kind, read = options.get("conv_type", "head"), x
        if options.get("conv_mixing") == "maps" and name == "v":
            taps = None
        if taps is not None and options["place"] == "before":
            read = parts.convolve(kind, x[:, None], taps)[:, 0]
        y = (read @ own[span].T + bias[span]).view(len(x), heads, -1)
        if taps is not None and options["place"] == "after":
            y = parts.convolve(kind, y, taps)
        found.append(silu(y) if options.get("activation") == "silu" else y)
    return found


def taps_of(name: str, weights: Weights, options: Options, time: int) -> Tensor | None:
    """Return a stream's filters, as taps where they are as long as the row."""
    own = weights.get(f"streams.convolution.{name}_filter")
    if own is None or options["filter"] == "taps":
        return own
    return long_filter.long_taps(options["filter"], own, options["filter_state"], time)


def attention(x: Tensor, weights: Weights, options: Options) -> Tensor:
    """Softmax attention over (filtered) streams: CAT, Landmark CAT and multi-token attention."""
    q, k, v = streams(x, weights, options)
    if options.get("position") == "rope":
        q, k = parts.rotate(q, 1.0, ROPE), parts.rotate(k, 1.0, ROPE)
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[2])
    visible = torch.ones(scores.shape, dtype=torch.bool).tril()
    if "size" in options:  # of chunks
        chunk = torch.arange(len(x)) // options["size"]
        visible &= chunk[:, None] == chunk
    if "block" in options:
        how = options | {"filter": options["landmark_filter"], "filter_state": 0}
        core = {n.removeprefix("core."): w for n, w in weights.items()}
        visible &= parts.landmark_visible(q, k, how, core)
    if "core.kernel" in weights:
        kernels = zip(scores.tril(), weights["core.kernel"], strict=True)
        scores = torch.stack([multi_token.convolve_scores(s, kernel) for s, kernel in kernels])
        if "core.before" in weights:
            scores = torch.einsum("gh,hij->gij", weights["core.before"], scores)
    maps = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    if "core.after" in weights:
        maps = torch.einsum("gh,hij->gij", weights["core.after"], maps)
    if options.get("conv_mixing") == "maps":
        maps = parts.mix_maps(maps, weights["streams.convolution.v_filter"])
    return linear(torch.einsum("hij,jhd->ihd", maps, v).flatten(1), weights, "out_proj")


def linear_attention(x: Tensor, weights: Weights, options: Options) -> Tensor:
    """φ = elu + 1 (Katharopoulos et al., 2020), over filtered streams in LinCAT."""
    q, k, v = streams(x, weights, {"filter": "taps", "place": "after"} | options)
    scores = torch.einsum("ihd,jhd->hij", F.elu(q) + 1, F.elu(k) + 1)
    return linear(weighted(scores, v).flatten(1), weights, "out_proj")


def based(x: Tensor, weights: Weights, options: Options) -> Tensor:
    """A gated convolution, or attention with 1 + s + s²/2, s = q·k / sqrt(f) (Arora, 2024)."""
    if "filters" in weights:
        moved = parts.convolve("depthwise", x[:, None], weights["filters"])[:, 0] + weights["bias"]
        return moved * linear(x, weights, "projection") + x
    q, k = linear(x, weights, "qk_proj").chunk(2, dim=-1)
    scores = (q @ k.T / math.sqrt(options["features"]))[None]
    y = weighted(1 + scores + scores**2 / 2, linear(x, weights, "v_proj")[:, None])
    return linear(y[:, 0], weights, "o_proj")


def gla(x: Tensor, weights: Weights, options: Options) -> Tensor:
    """Gated linear attention (Yang et al., 2024): S ← diag(α) S + k vᵀ, α = σ(·)^{1/16}."""
    q, k, v = projected(x, weights, options.get("heads") or options["num_heads"])
    gates = linear(linear(x, weights, "gk_proj.0"), weights, "gk_proj.1").sigmoid() ** (1 / 16)
    y = decayed_recurrence(q, k, v, gates.view_as(k))
    y = rms(y, weights["g_norm_swish_gate.weight"], options.get("norm_eps", 1e-5)).flatten(1)
    return linear(y * silu(linear(x, weights, "g_proj")), weights, "o_proj")


def deltanet(x: Tensor, weights: Weights, options: Options) -> Tensor:
    """(Gated) DeltaNet with unit queries and keys."""
    made, heads = {}, options["heads"]
    for name in "qkv":
        projected = name if f"{name}_proj.weight" in weights else "k"
        y = linear(x, weights, f"{projected}_proj")
        if (taps := weights.get(f"convolution.{name}_filter")) is not None:
            y = parts.convolve(options["conv_type"], y.view(len(x), heads, -1), taps).flatten(1)
        y = silu(y) if options["activation"] == "silu" else y
        made[name] = y.view(len(x), heads, -1)
    q, k = (made[n] / made[n].norm(dim=-1, keepdim=True).clamp(min=1e-12) for n in "qk")
    rate = linear(x, weights, "b_proj").sigmoid()
    decay = torch.ones_like(rate)
    if "A_log" in weights:
        steps = softplus(linear(x, weights, "a_proj") + weights["dt_bias"])
        decay = (-weights["A_log"].exp() * steps).exp()
    y = delta_rule(q, k, made["v"], rate, decay)
    return linear(rms(y, weights["o_norm.weight"], 1e-5).flatten(1), weights, "o_proj")


def mamba(x: Tensor, weights: Weights, options: Options) -> Tensor:
    """Mamba (Gu and Dao, 2023), algorithm 2."""
    u, gate = linear(x, weights, "in_proj").chunk(2, dim=-1)
    u, states = filtered(u, weights), weights["A_log"].shape[1]
    low = linear(u, weights, "x_proj")
    low, b, c = low.split([low.shape[1] - 2 * states, states, states], dim=-1)
    delta = softplus(linear(low, weights, "dt_proj"))
    y = selective_scan(u, delta, -weights["A_log"].exp(), b, c) + weights["D"] * u
    return linear(y * silu(gate), weights, "out_proj")


MIXERS = dict.fromkeys(("attention", "cat", "chunk", "landmark", "multi-token"), attention)
MIXERS |= dict.fromkeys(("linear-attention", "lincat"), linear_attention)
MIXERS |= dict.fromkeys(("deltanet", "gated-deltanet"), deltanet)
MIXERS |= {"based": based, "gla": gla, "mamba": mamba}
MIXERS["none"] = lambda x, weights, options: x @ weights["weight"].T + weights["bias"]


def mix(name: str, x: Tensor, weights: Weights, options: Options) -> Tensor:
    """Return a mixer's output [T, C]."""
    return MIXERS[name](x, weights, options)
