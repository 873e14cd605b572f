"""Values convolved for the mixing of attention maps.

`cat_lm.model.attention.modules.map_mixing` has the algebra.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.ops.convolution.api import convolve


def mix_values(
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


def places_of_real_keys(is_real: Tensor) -> Tensor:
    """Return each real key's index among the real keys, S for padding; [B, S] bool to [B, S]."""
    return (is_real.cumsum(dim=1) - 1).where(is_real, is_real.shape[1])


def close_gaps(maps: Tensor, place: Tensor) -> Tensor:
    """Move the keys of maps [B, H, T, S] to their places, so that padding leaves no gaps."""
    batch, heads, time, keys = maps.shape
    place = place[:, None, None, :].expand(batch, heads, time, keys)
    return maps.new_zeros(batch, heads, time, keys + 1).scatter(3, place, maps)[..., :keys]


def reopen_gaps(maps: Tensor, place: Tensor) -> Tensor:
    """Undo `close_gaps`, with zeros at padding."""
    return F.pad(maps, (0, 1)).gather(3, place[:, None, None, :].expand(maps.shape))


def sum_over_maps(output: Tensor) -> Tensor:
    """Sum attention's outputs for `mix_values` to Y_i: [B, T, H, H D] to [B, T, H, D]."""
    return output.unflatten(3, (output.shape[2], -1)).sum(dim=2)
