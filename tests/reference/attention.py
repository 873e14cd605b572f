"""Attention of one row by loops: filters, positions, decays, patterns, in double precision.

Everything is written for one sequence. Shapes: T tokens, H heads, D channels of a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.reference import convolution, landmark
from tests.reference.long_filter import long_taps


def convolve(kind: str, x: Tensor, filters: Tensor) -> Tensor:
    """Return the causal convolution of x [T, H, D]."""
    return convolution.convolve(kind, x[None], filters)[0]


def normalized(kind: str, filters: Tensor) -> Tensor:
    """Return filters divided by the sum of the magnitudes that one output reads."""
    if kind == "multihead":
        return filters / filters.abs().sum((0, 2))[None, :, None]
    return filters / filters.abs().sum(-1, keepdim=True)


def frequencies(width: int, rope: dict[str, Any]) -> tuple[Tensor, float]:
    """Return the angles a token of pairs of channels, and what cosines and sines are scaled by.

    Su et al. (2021); linear: Chen et al. (2023); yarn: Peng et al. (2023), equations 19 to 24.
    """
    base, half = rope["rope_theta"], width // 2
    plain = torch.tensor([base ** (-2 * pair / width) for pair in range(half)], dtype=torch.float64)
    factor = rope.get("factor", 1.0)
    if rope["rope_type"] == "linear":
        return plain / factor, 1.0
    if rope["rope_type"] == "default":
        return plain, 1.0
    length = rope["original_max_position_embeddings"]

    def pair_of(turns: float) -> float:
        return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(pair_of(32)), 0), min(math.ceil(pair_of(1)), width - 1)
    high += 0.001 * (low == high)
    for pair in range(half):
        ramp = min(max((pair - low) / (high - low), 0.0), 1.0)
        plain[pair] *= 1 - ramp + ramp / factor
    return plain, 0.1 * math.log(factor) + 1


def rotate(x: Tensor, part: float, rope: dict[str, Any]) -> Tensor:
    """Return x [T, H, D] whose first part of the channels is rotated, halves together."""
    width = int(x.shape[-1] * part)
    angles, scale = frequencies(width, rope)
    y, half = x.clone(), width // 2
    for t in range(len(x)):
        for pair in range(half):
            cos, sin = (t * angles[pair]).cos() * scale, (t * angles[pair]).sin() * scale
            first, second = x[t, :, pair], x[t, :, pair + half]
            y[t, :, pair] = first * cos - second * sin
            y[t, :, pair + half] = second * cos + first * sin
    return y


def decay_rates(heads: int, spacing: str, bound: float) -> Tensor:
    """Return LaS's rates: e^{−α} evenly from 1 to e^{−bound} (slow), or to bound (steep)."""
    last = math.exp(-bound) if spacing == "slow" else bound
    return torch.tensor([-math.log(1 + (last - 1) * h / (heads - 1)) for h in range(heads)])


def smooth(value: Tensor, width: int, chunk: int | None) -> Tensor:
    """Return the means of the last values [T, H, D] within a chunk, zeros before it (LaS)."""
    y = torch.zeros_like(value)
    for t in range(len(value)):
        first = 0 if chunk is None else t - t % chunk
        for s in range(max(first, t - width + 1), t + 1):
            y[t] += value[s] / width
    return y


def landmark_keys(keys: Tensor, options: dict[str, Any], weights: dict[str, Tensor]) -> Tensor:
    """Return one key for each complete block of keys [T, D] of one head (CAT, section 5)."""
    block, name = options["block"], options.get("filter", "box")
    if name == "learned":
        taps = weights["filter"]
    elif options.get("filter_state"):
        taps = long_taps(name, weights["filter"][None], options["filter_state"], len(keys))[0]
    else:
        taps = landmark.fixed_taps(name, block, len(keys))
    found = landmark.landmarks(keys, taps, block)
    return torch.stack(found) if found else keys[:0]


def chosen_blocks(scores: Tensor, time: int, options: dict[str, Any]) -> list[set[int]]:
    """Return the blocks that each query reads beside the local ones, of scores [heads, T, n].

    Heads that share a choice add their softmax over the candidates.
    """
    chosen = []
    for t in range(time):
        last = t // options["block"] - options["local"]
        sink = {0} if options.get("sink") and last >= 0 else set()
        candidates = [j for j in range(last + 1) if j not in sink]
        marks = scores[:, t, candidates]
        marks = marks.softmax(-1).sum(0) if len(marks) > 1 else marks[0]
        best = marks.argsort(descending=True, stable=True)[: options["top_k"]].tolist()
        chosen.append(sink | {candidates[place] for place in best})
    return chosen


def landmark_visible(
    query: Tensor, key: Tensor, options: dict[str, Any], weights: dict[str, Tensor]
) -> Tensor:
    """Return which keys [H, T, T] queries [T, H, D] see; keys [T, G, D] may have fewer heads."""
    time, heads = query.shape[:2]
    groups = key.shape[1]
    marks = []
    for group in range(groups):
        own = {name: w[group] for name, w in weights.items() if name == "filter"}
        marks.append(landmark_keys(key[:, group], options, own))
    scores = [query[:, h] @ marks[h * groups // heads].T for h in range(heads)]
    visible = torch.zeros(heads, time, time, dtype=torch.bool)
    sharing = [range(heads)] if options.get("share") == "layer" else []
    each = heads // groups
    for members in sharing or [range(g * each, (g + 1) * each) for g in range(groups)]:
        chosen = chosen_blocks(torch.stack([scores[h] for h in members]), time, options)
        for t in range(time):
            own = t // options["block"]
            read = chosen[t] | {*range(own - options["local"] + 1, own + 1)}
            for s in range(t + 1):
                visible[[*members], t, s] = s // options["block"] in read
    return visible


def mix_maps(maps: Tensor, filters: Tensor) -> Tensor:
    """Return A'_i[t,m] = Σ_h Σ_j F[j,i,h] A_h[t,m+j] of maps [H, T, T] (MH-CAT on maps)."""
    mixed = torch.zeros_like(maps)
    for lag in range(min(len(filters), maps.shape[2])):
        for m in range(maps.shape[2] - lag):
            mixed[:, :, m] += filters[lag] @ maps[:, :, m + lag]
    return mixed
