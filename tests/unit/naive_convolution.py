"""The convolutions as loops over their indices, in fp64: what every backend is compared with."""

from __future__ import annotations

import torch
from torch import Tensor


def naive_convolution(
    conv_type: str,
    x: Tensor,
    filters: Tensor,
    bias: Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """y of x [B, T, H, D], differentiable; `documents` [B, T] are ids of runs.

    Written without any function of the project, index by index.
    """
    x, filters = x.double(), filters.double()
    batch, time, heads, width = x.shape
    window = filters.shape[0] if conv_type == "multihead" else filters.shape[-1]
    rows = []
    for b in range(batch):
        for t in range(time):
            total = torch.zeros(heads, width, dtype=torch.float64)
            for lag in range(window):
                if t - lag < 0 or not _is_one_document(documents, b, t - lag, t):
                    continue
                past = x[b, t - lag]
                if conv_type == "head":
                    total = total + torch.stack([filters[h, lag] * past[h] for h in range(heads)])
                elif conv_type == "depthwise":
                    total = total + torch.stack(
                        [filters[h, :, lag] * past[h] for h in range(heads)]
                    )
                else:
                    total = total + torch.stack(
                        [
                            sum(filters[lag, i, h] * past[h] for h in range(heads))
                            for i in range(heads)
                        ]
                    )
            rows.append(total if bias is None else total + bias.double())
    return torch.stack(rows).view(batch, time, heads, width)


def filter_shape(conv_type: str, heads: int, width: int, window: int) -> tuple[int, ...]:
    """The shape of the filters of one stream."""
    return {
        "head": (heads, window),
        "depthwise": (heads, width, window),
        "multihead": (window, heads, heads),
    }[conv_type]


def _is_one_document(documents: Tensor | None, row: int, first: int, last: int) -> bool:
    return documents is None or bool(
        (documents[row, first : last + 1] == documents[row, last]).all()
    )
