"""Logits of a whole recurrent language model from its weights and its configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.reference import mixers
from tests.reference.mixers import filtered, projected, rms, silu, softplus
from tests.reference.transformer import Weights, below, linear


def unit(x: Tensor) -> Tensor:
    """Return x / |x|, with the package's 10⁻⁶ below the root."""
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def delta_net(x: Tensor, weights: Weights, config: dict[str, Any]) -> Tensor:
    """(Gated) DeltaNet (Yang et al., 2024; 2025)."""
    q, k, v = projected(x, weights, config["num_heads"])
    rate = linear(x, weights, "b_proj").sigmoid()
    decay, gate = torch.ones_like(rate), 1
    if "A_log" in weights:
        steps = softplus(linear(x, weights, "a_proj") + weights["dt_bias"])
        decay = (-weights["A_log"].exp() * steps).exp()
        gate = silu(linear(x, weights, "g_proj"))
    y = mixers.delta_rule(unit(q), unit(k), v, rate, decay)
    y = rms(y, weights["o_norm.weight"], config["norm_eps"])
    return linear(y.flatten(1) * gate, weights, "o_proj")


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
    "gla": mixers.gla,
    "delta_net": delta_net,
    "gated_deltanet": delta_net,
    "mamba": mixers.mamba,
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
