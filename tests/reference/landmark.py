"""Attention to local keys and to blocks chosen by their landmarks, a query and a head at a time.

CAT, section 5; with `box` filters and one local block it is MoBA (Lu et al., 2025, equations 2 to
5). Tokens are counted from 0 in every document of a row, padding left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def documents_of(documents: Tensor | None, padding: Tensor | None, row: int, time: int):
    """Return the slots of each document's tokens in a row."""
    found: dict[int, list[int]] = {}
    for slot in range(time):
        if padding is None or padding[row, slot]:
            name = 0 if documents is None else int(documents[row, slot])
            found.setdefault(name, []).append(slot)
    return list(found.values())


def fixed_taps(name: str, block: int, length: int) -> list[float]:
    """Return the taps of a fixed filter: a mean of a block, or a decay over `length` lags."""
    if name == "box":
        return [1 / block] * block
    rate = math.exp(-1 / block)
    total = sum(rate**lag for lag in range(block))
    return [rate**lag / total for lag in range(length)]


def landmarks(keys: Tensor, taps: Any, block: int) -> list[Tensor]:
    """Return the sums of the keys [tokens, D] up to the end of each complete block by the taps."""
    ends = range(block - 1, len(keys), block)
    reaches = [min(end + 1, len(taps)) for end in ends]
    return [
        sum(taps[lag] * keys[end - lag] for lag in range(reach))
        for end, reach in zip(ends, reaches, strict=True)
    ]


def ranked(scores: dict[int, list[Tensor]], choice: Any) -> list[int]:
    """Return the top_k candidates by their scores for the heads that share a choice.

    Several heads add their softmax over the candidates; equal ones go to the earlier block.
    """
    if not scores:
        return []
    table = torch.tensor([[float(s) for s in own] for own in scores.values()]).double()
    rank = table[:, 0] if table.shape[1] == 1 else table.softmax(0).sum(1)
    order = sorted(range(len(rank)), key=lambda i: (-float(rank[i]), i))
    return [list(scores)[i] for i in order[: choice.top_k]]


def _read(
    query: Tensor, key: Tensor, slots: list[int], name: str, block: int, choice: Any
) -> Iterator[tuple[int, int, list[int]]]:
    """Yield each query's slot, head and the slots of the keys it reads, in one document."""
    heads, groups = query.shape[0], query.shape[0] // key.shape[0]
    taps = fixed_taps(name, block, len(slots))
    marks = [landmarks(own[slots], taps, block) for own in key.detach()]
    for place, slot in enumerate(slots):
        own = place // block
        old = range(max(0, own - choice.local + 1))
        sink = [0] if choice.sink and len(old) else []
        candidates = [j for j in old if j not in sink]
        near = slots[len(old) * block : place + 1]
        for head in range(heads):
            first = head // groups * groups
            sharing = range(heads) if choice.share == "layer" else range(first, first + groups)
            scores = {
                j: [query[h, slot].detach() @ marks[h // groups][j] for h in sharing]
                for j in candidates
            }
            chosen = sink + ranked(scores, choice)
            far = [s for j in chosen for s in slots[j * block : (j + 1) * block]]
            yield slot, head, far + near


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    name: str,
    block: int,
    choice: Any,
    scaling: float,
    documents: Tensor | None = None,
    padding: Tensor | None = None,
) -> Tensor:
    """Return attention [B, H, T, D], zeros at padding, differentiable; the choice is not.

    Args:
        query: [B, H, T, D]; key, value: [B, H or fewer, T, D].
        choice: has top_k, local, sink and share ("head": heads of one key; "layer": all).
    """
    rows = []
    for row in range(len(query)):
        found = [list(torch.zeros_like(own).unbind(0)) for own in query[row]]
        for slots in documents_of(documents, padding, row, query.shape[2]):
            for slot, head, seen in _read(query[row], key[row], slots, name, block, choice):
                group = head // (query.shape[1] // key.shape[1])
                logits = key[row, group, seen] @ query[row, head, slot] * scaling
                found[head][slot] = logits.softmax(0) @ value[row, group, seen]
        rows.append(torch.stack([torch.stack(own) for own in found]))
    return torch.stack(rows)


def block_mass(query: Tensor, key: Tensor, slots: list[int], block: int, scaling: float) -> Tensor:
    """Return dense attention's sums [tokens, blocks] over the keys of blocks before a query's own.

    Of one head's queries and keys [T, D], and the slots of a document.
    """
    found = query.new_zeros(len(slots), len(slots) // block)
    for t, slot in enumerate(slots):
        weights = (key[slots[: t + 1]] @ query[slot] * scaling).softmax(0)
        for j in range(t // block):
            found[t, j] = weights[j * block : (j + 1) * block].sum()
    return found
