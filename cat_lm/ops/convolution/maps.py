"""Values convolved for the mixing of attention maps; `cat_lm.model.map_mixing` has the algebra."""

from __future__ import annotations

import torch
from torch import Tensor

from cat_lm.ops.convolution.api import convolve


def mixed_values(
    value: Tensor,
    filters: Tensor,
    document_ids: Tensor | None = None,
    backend: str = "auto",
    positions: Tensor | None = None,
) -> Tensor:
    """F_{i,h} * V_i for all i side by side, for every h.

    Args:
        value: V [B, T, H, D] with its bias, zeros at padding.
        filters: F [W, H, H].
        document_ids: [B, T]; zeros are read across a change of the id.
        backend: as for `cat_lm.ops.head_conv`.
        positions: as for `cat_lm.ops.convolve`.

    Returns:
        [B, T, H, H D], head h in dimension 2.
    """
    how = {"document_ids": document_ids, "positions": positions, "backend": backend}
    mixed = [
        convolve("head", value, taps, **how)
        for taps in filters.permute(2, 1, 0).unbind(0)  # for each h: [H_out, W]
    ]
    return torch.stack(mixed, dim=2).flatten(3)


def sum_over_maps(output: Tensor) -> Tensor:
    """Y_i from what attention makes of `mixed_values`: [B, T, H, H D] to [B, T, H, D]."""
    return output.unflatten(3, (output.shape[2], -1)).sum(dim=2)
