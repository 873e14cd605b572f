"""Multi-token attention of one row by loops (Golovneva et al., 2025, sections 3.1 to 3.3)."""

from __future__ import annotations

import torch
from torch import Tensor


def convolve_scores(scores: Tensor, kernel: Tensor) -> Tensor:
    """Return Z[i,j] = Σ_ab θ[a,b] S[i−a, j+b] of scores [T, T] with zeros above the diagonal."""
    time, (rows, columns) = len(scores), kernel.shape
    found = []
    for i in range(time):
        for j in range(time):
            total = scores.new_zeros(())
            for a in range(min(rows, i + 1)):
                for b in range(columns):
                    read = j + b - columns // 2
                    if 0 <= read <= i - a:
                        total = total + kernel[a, b] * scores[i - a, read]
            found.append(total)
    return torch.stack(found).view(time, time)


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
    scores = torch.stack([convolve_scores(*own) for own in zip(scores, kernel, strict=True)])
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
