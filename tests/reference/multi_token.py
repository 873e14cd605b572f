"""Multi-token attention of one row by loops (Golovneva et al., 2025, sections 3.1 to 3.3)."""

from __future__ import annotations

import torch
from torch import Tensor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Tensor,
    before: Tensor | None,
    after: Tensor | None,
    scaling: float,
) -> Tensor:
    """Return [H, T, D] of queries, keys and values [H, T, D] of one document.

    Scores are convolved over queries and keys with the kernel [H, c_q, c_k], scores after their
    query being zeros, and mixed over heads by `before` [H, H]; maps are mixed by `after`.
    """
    heads, time = query.shape[:2]
    scores = query @ key.mT * scaling
    found = []
    for head in range(heads):
        for i in range(time):
            for j in range(time):
                total = scores.new_zeros(())
                for a in range(min(kernel.shape[1], i + 1)):
                    for b in range(kernel.shape[2]):
                        read = j + b - kernel.shape[2] // 2
                        if 0 <= read <= i - a:
                            total = total + kernel[head, a, b] * scores[head, i - a, read]
                found.append(total)
    scores = torch.stack(found).view(heads, time, time)
    if before is not None:
        scores = torch.einsum("gh,hts->gts", before, scores)
    rows = [
        torch.cat([row[: t + 1].softmax(0), torch.zeros_like(row[t + 1 :])])
        for own in scores
        for t, row in enumerate(own)
    ]
    maps = torch.stack(rows).view(heads, time, time)
    if after is not None:
        maps = torch.einsum("gh,hts->gts", after, maps)
    return maps @ value
