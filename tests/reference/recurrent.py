"""Logits of a whole recurrent language model from its weights and its configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.reference import mixers
from tests.reference.transformer import Weights, below, linear


def rms(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def silu(x: Tensor) -> Tensor:
    return x * x.sigmoid()


def softplus(x: Tensor) -> Tensor:
    return torch.log1p(x.exp())


def unit(x: Tensor) -> Tensor:
    """Return x / |x|, with the package's 10⁻⁶ below the root."""
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def filtered(x: Tensor, weights: Weights, name: str = "conv1d") -> Tensor:
    """Return SiLU of the depthwise convolution of x [T, C]; the library's taps are oldest first."""
    taps = weights[f"{name}.weight"][:, 0]
    y = torch.zeros_like(x)
    for t in range(len(x)):
        for lag in range(min(taps.shape[1], t + 1)):
            y[t] += taps[:, -1 - lag] * x[t - lag]
    return silu(y + weights.get(f"{name}.bias", 0))


def streams(x: Tensor, weights: Weights, heads: int) -> list[Tensor]:
    """Return q, k and v [T, H, D], convolved where there are filters."""
    found = []
    for name in "qkv":
        y = linear(x, weights, f"{name}_proj")
        if f"{name}_conv1d.weight" in weights:
            y = filtered(y, weights, f"{name}_conv1d")
        found.append(y.view(len(x), heads, -1))
    return found


def gla(x: Tensor, weights: Weights, config: dict[str, Any]) -> Tensor:
    """Gated linear attention (Yang et al., 2024): S ← diag(α) S + k vᵀ, α = σ(·)^{1/16}."""
    q, k, v = streams(x, weights, config["num_heads"])
    gates = linear(linear(x, weights, "gk_proj.0"), weights, "gk_proj.1").sigmoid() ** (1 / 16)
    y = mixers.decayed_recurrence(q, k, v, gates.view_as(k))
    y = rms(y, weights["g_norm_swish_gate.weight"], config["norm_eps"])
    return linear(y.flatten(1) * silu(linear(x, weights, "g_proj")), weights, "o_proj")


def delta_net(x: Tensor, weights: Weights, config: dict[str, Any]) -> Tensor:
    """(Gated) DeltaNet (Yang et al., 2024; 2025)."""
    q, k, v = streams(x, weights, config["num_heads"])
    rate = linear(x, weights, "b_proj").sigmoid()
    decay, gate = torch.ones_like(rate), 1
    if "A_log" in weights:
        steps = softplus(linear(x, weights, "a_proj") + weights["dt_bias"])
        decay = (-weights["A_log"].exp() * steps).exp()
        gate = silu(linear(x, weights, "g_proj"))
    y = mixers.delta_rule(unit(q), unit(k), v, rate, decay)
    y = rms(y, weights["o_norm.weight"], config["norm_eps"])
    return linear(y.flatten(1) * gate, weights, "o_proj")


def mamba(x: Tensor, weights: Weights, config: dict[str, Any]) -> Tensor:
    """Mamba (Gu and Dao, 2023), algorithm 2."""
    u, gate = linear(x, weights, "in_proj").chunk(2, dim=-1)
    u, states = filtered(u, weights), config["state_size"]
    low, b, c = linear(u, weights, "x_proj").split([config["time_step_rank"], states, states], -1)
    delta = softplus(linear(low, weights, "dt_proj"))
    y = mixers.selective_scan(u, delta, -weights["A_log"].exp(), b, c) + weights["D"] * u
    return linear(y * silu(gate), weights, "out_proj")


def mamba2(x: Tensor, weights: Weights, config: dict[str, Any]) -> Tensor:
    """Mamba-2 (Dao and Gu, 2024): one rate a head, B and C of groups of heads."""
    heads, groups, width = config["num_heads"], config["n_groups"], config["head_dim"]
    inner, states = heads * width, config["state_size"]
    parts = linear(x, weights, "in_proj").split([inner, inner + 2 * groups * states, heads], -1)
    gate, u, steps = parts
    u, b, c = filtered(u, weights).split([inner, groups * states, groups * states], -1)
    delta = softplus(steps + weights["dt_bias"]).clamp(*config["time_step_limit"])
    y = torch.zeros(len(x), heads, width, dtype=x.dtype)
    u, b, c = u.view(len(x), heads, width), b.view(len(x), groups, -1), c.view(len(x), groups, -1)
    for h in range(heads):
        group, state = h * groups // heads, torch.zeros(states, width, dtype=x.dtype)
        for t in range(len(x)):
            decay = (-weights["A_log"][h].exp() * delta[t, h]).exp()
            state = decay * state + delta[t, h] * torch.outer(b[t, group], u[t, h])
            y[t, h] = state.T @ c[t, group] + weights["D"][h] * u[t, h]
    y = (y.flatten(1) * silu(gate)).view(len(x), groups, -1)
    y = rms(y, 1, config["layer_norm_epsilon"]).flatten(1) * weights["norm.weight"]
    return linear(y, weights, "out_proj")


def mixer(x: Tensor, weights: Weights, config: dict[str, Any]) -> Tensor:
    """The mixer that the configuration names."""
    return mixers.mix(config["mixer"], x, weights, config["mixer_options"])


LAYERS = {
    "gla": gla,
    "delta_net": delta_net,
    "gated_deltanet": delta_net,
    "mamba": mamba,
    "mamba2": mamba2,
    "mixer": mixer,
}


def logits(weights: Weights, config: dict[str, Any], ids: Tensor) -> Tensor:
    """Return the logits [T, vocabulary] of one row of token ids [T]."""
    kind = config["model_type"].removeprefix("cat_")
    is_mamba = kind.startswith("mamba")
    head, body = weights["lm_head.weight"], below(weights, "backbone." if is_mamba else "model.")
    x = body["embed_tokens.weight" if kind == "mixer" else "embeddings.weight"][ids]
    if "embed_positions.weight" in body:
        x = x + body["embed_positions.weight"][: len(ids)]
    epsilon = config.get("layer_norm_epsilon") or config.get("norm_eps") or config["rms_norm_eps"]
    for index in range(config["num_hidden_layers"]):
        own = below(body, f"layers.{index}.")
        if is_mamba:
            x = x + LAYERS[kind](rms(x, own["norm.weight"], epsilon), below(own, "mixer."), config)
            continue
        names = ("mixer_norm", "mixer") if kind == "mixer" else ("attn_norm", "attn")
        read = rms(x, own[f"{names[0]}.weight"], epsilon)
        x = x + LAYERS[kind](read, below(own, f"{names[1]}."), config)
        read = rms(x, own["mlp_norm.weight"], epsilon)
        gate = silu(linear(read, own, "mlp.gate_proj"))
        x = x + linear(gate * linear(read, own, "mlp.up_proj"), own, "mlp.down_proj")
    return rms(x, body["norm_f.weight" if is_mamba else "norm.weight"], epsilon) @ head.T
