"""Logits of a whole CAT decoder, GPT-NeoX or Llama, from its weights and its configuration."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.reference import attention as parts
from tests.reference import long_filter, multi_token

Weights = dict[str, Tensor]


def below(weights: Weights, prefix: str) -> Weights:
    """Return the weights whose names begin with the prefix, without it."""
    return {n[len(prefix) :]: w for n, w in weights.items() if n.startswith(prefix)}


def linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def norm(x: Tensor, weights: Weights, name: str, config: dict[str, Any]) -> Tensor:
    """Return LayerNorm of GPT-NeoX, or RMSNorm of Llama."""
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    if bias is None:
        return x / (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * weight
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + config["layer_norm_eps"]).sqrt() * weight + bias


def canon(x: Tensor, weights: Weights, place: str) -> Tensor:
    """Return x [T, C] and its convolution ("Canon layers", Allen-Zhu, 2025), if there is one."""
    filters = weights.get(f"canon.{place}.canon_filter")
    if filters is None:
        return x
    return x + parts.convolve("depthwise", x[:, None], filters)[:, 0]


def projections(x: Tensor, weights: Weights, config: dict[str, Any]) -> tuple[Weights, Weights]:
    """Return x W of each stream [T, heads, D] and its bias [heads, D], zeros where it has none."""
    heads = config["num_attention_heads"]
    plain, biases = {}, {}
    if "query_key_value.weight" in weights:
        packed = x @ weights["query_key_value.weight"].T
        bias = weights.get("query_key_value.bias", weights.get("convolution.bias"))
        bias = x.new_zeros(packed.shape[1]) if bias is None else bias
        packed, bias = packed.view(len(x), heads, 3, -1), bias.view(heads, 3, -1)
        for index, stream in enumerate("qkv"):
            plain[stream], biases[stream] = packed[:, :, index], bias[:, index]
        return plain, biases
    for stream in "qkv":
        own = heads if stream == "q" else config["num_key_value_heads"] or heads
        plain[stream] = (x @ weights[f"{stream}_proj.weight"].T).view(len(x), own, -1)
        bias = weights.get(f"{stream}_proj.bias", weights.get(f"convolution.{stream}_bias"))
        biases[stream] = (plain[stream][0] * 0) if bias is None else bias.view(own, -1)
    return plain, biases


def filters_of(stream: str, weights: Weights, config: dict[str, Any], time: int) -> list[Tensor]:
    """Return the filters of a stream, of which queries and keys may have several (ranks)."""
    own = weights.get(f"convolution.{stream}_filter")
    if own is None:
        return []
    if config["conv_filter"] != "taps":
        return [long_filter.long_taps(config["conv_filter"], own, config["conv_state"], time)]
    every = [own, *weights.get(f"convolution.{stream}_rank_filter", ())]
    if config["conv_norm"] == "l1" and len(every) > 1:
        total = sum(filters.abs().sum(-1, keepdim=True) for filters in every)
        return [filters / total for filters in every]
    return [parts.normalized(config["conv_type"], own)] if config["conv_norm"] == "l1" else every


def stream(name: str, x: Tensor, bias: Tensor, weights: Weights, config: dict[str, Any]) -> Tensor:
    """Return F * (X W) + b, normalised where the configuration says, [T, heads, R D]."""
    before = config["qk_norm_place"] == "before" and name != "v"
    if before:
        x, bias = head_norm(name, x + bias, weights, config), bias * 0
    filters = filters_of(name, weights, config, len(x))
    if config["conv_mixing"] == "maps" and name == "v":
        filters = []
    if not filters:
        y = x + bias
    else:
        made = [parts.convolve(config["conv_type"], x, own) for own in filters]
        y = torch.cat([made[0] + bias, *made[1:]], dim=-1)
        if config["conv_activation"] == "silu":
            y = y * y.sigmoid()
    return y if before or name == "v" else head_norm(name, y, weights, config)


def head_norm(name: str, x: Tensor, weights: Weights, config: dict[str, Any]) -> Tensor:
    """Return x / |x| times sqrt(s) for logits s q̂·k̂ (Henry et al., 2020), or RMSNorm (Qwen3)."""
    if config["qk_norm"] == "none":
        return x
    ranks = 1 if config["qk_norm_place"] == "before" else config["conv_rank"]
    width = x.shape[-1] // ranks
    unit = x / (x.square().sum(-1, keepdim=True) / width + 1e-6).sqrt()
    if config["qk_norm"] == "rms":
        return unit * weights[f"qk_norm.{name}_weight"].repeat(ranks)
    # The logits are divided by sqrt(D) later, and both have the length sqrt(D) here.
    return (
        unit if name == "k" else unit * weights["qk_norm.logit_scale"][:, None] / math.sqrt(width)
    )


def attention(x: Tensor, weights: Weights, config: dict[str, Any]) -> Tensor:
    """Return the attention of [T, C] before its output projection."""
    time, heads = len(x), config["num_attention_heads"]
    plain, biases = projections(x, weights, config)
    streams = {n: stream(n, plain[n], biases[n], weights, config) for n in "qkv"}
    value, width = streams["v"], streams["v"].shape[-1]
    query, key = (turned(streams[n], width, config) for n in "qk")
    pattern, options = config["attention"], config["attention_options"] or {}
    chunk = options["size"] if pattern == "chunk" else None
    if config["value_transform"] == "smoothing":
        value = parts.smooth(value, config["value_options"]["width"], chunk)
    own = below(weights, "core.")
    visible = torch.ones(heads, time, time, dtype=torch.bool).tril()
    if pattern == "landmark":
        visible &= parts.landmark_visible(query, key, options, own)
    elif chunk:
        visible &= torch.tensor(
            [[i // chunk == j // chunk for j in range(time)] for i in range(time)]
        )
    repeated = heads // key.shape[1]
    key, value = (y.repeat_interleave(repeated, dim=1) for y in (key, value))
    logits = torch.einsum("ihd,jhd->hij", query, key) / math.sqrt(width)
    logits = decayed(logits / config["attention_temperature"], config)
    if pattern == "multi_token":
        logits = [
            multi_token.convolve_scores(s, k)
            for s, k in zip(logits.tril(), own["kernel"], strict=True)
        ]
        logits = torch.stack(logits)
        if "before" in own:
            logits = torch.einsum("gh,hij->gij", own["before"], logits)
    maps = logits.masked_fill(~visible, -torch.inf).softmax(-1)
    if "after" in own:
        maps = torch.einsum("gh,hij->gij", own["after"], maps)
    if config["conv_mixing"] == "maps":
        maps = parts.mix_maps(maps, weights["convolution.v_filter"])
    return torch.einsum("hij,jhd->ihd", maps, value).flatten(1)


def turned(x: Tensor, width: int, config: dict[str, Any]) -> Tensor:
    """Return x [T, heads, R D] rotated, each rank of D channels by itself."""
    if config["position_embedding"] == "none":
        return x
    rope = config["rope_parameters"]
    part = rope.get("partial_rotary_factor", 1.0)
    return torch.cat([parts.rotate(y, part, rope) for y in x.split(width, dim=-1)], dim=-1)


def decayed(logits: Tensor, config: dict[str, Any]) -> Tensor:
    """Return logits [H, T, T] times e^{−α_h (i − j)} (LaS)."""
    if config["score_transform"] == "none":
        return logits
    rates = parts.decay_rates(len(logits), **config["score_options"])
    for i in range(logits.shape[1]):
        for j in range(i + 1):
            logits[:, i, j] = logits[:, i, j] * torch.exp(-rates * (i - j))
    return logits


def layer(x: Tensor, weights: Weights, config: dict[str, Any]) -> Tensor:
    """Return a block's output [T, C]."""
    is_neox = "attention.dense.weight" in weights
    name, output = ("attention.", "dense") if is_neox else ("self_attn.", "o_proj")
    read = canon(norm(x, weights, "input_layernorm", config), weights, "A")
    attended = linear(attention(read, below(weights, name), config), weights, name + output)
    parallel = is_neox and config["use_parallel_residual"]
    read = norm(x if parallel else x + attended, weights, "post_attention_layernorm", config)
    read = canon(read, weights, "C")
    if is_neox:
        inner = F.gelu(canon(linear(read, weights, "mlp.dense_h_to_4h"), weights, "D"))
        return x + attended + linear(inner, weights, "mlp.dense_4h_to_h")
    gates = linear(read, weights, "mlp.gate_proj"), linear(read, weights, "mlp.up_proj")
    gate, up = canon(torch.cat(gates, dim=-1), weights, "D").chunk(2, dim=-1)
    return x + attended + linear(gate * gate.sigmoid() * up, weights, "mlp.down_proj")


def logits(weights: Weights, config: dict[str, Any], ids: Tensor) -> Tensor:
    """Return the logits [T, vocabulary] of one row of token ids [T]."""
    head = weights["lm_head.weight"].double()
    is_neox = "gpt_neox.embed_in.weight" in weights
    weights = {
        n: w.double() for n, w in below(weights, "gpt_neox." if is_neox else "model.").items()
    }
    x = weights["embed_in.weight" if is_neox else "embed_tokens.weight"][ids]
    for index in range(config["num_hidden_layers"]):
        x = layer(x, below(weights, f"layers.{index}."), config)
    return norm(x, weights, "final_layer_norm" if is_neox else "norm", config) @ head.T
