"""The multi-head convolution: one causal filter for each pair of heads.

    y[b,t,i,:] = sum_h sum_j F[j,i,h] x[b,t−j,h,:],     F [W, H_out, H_in], lag 0 first

(CAT, section 3.1: a filter F of W × H × H on the embeddings of all heads). With F[j] diagonal for
every lag j, this is the convolution per head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.ops.reference import delayed_inputs


def multihead_conv_reference(x: Tensor, filters: Tensor, runs: Tensor | None = None) -> Tensor:
    """As the definition reads, lag by lag.

    Args:
        x: [B, T, H, D].
        filters: [W, H, H].
        runs: [B, T] document numbers; inputs of another document are read as zeros.

    Sums in fp32 where x has half precision, and returns the dtype of x.
    """
    sum_dtype = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros(x.shape, dtype=sum_dtype, device=x.device)
    for lag, delayed in delayed_inputs(x, filters.shape[0], runs):
        y = y + torch.einsum("ih,bthd->btid", filters[lag].to(sum_dtype), delayed.to(sum_dtype))
    return y.to(x.dtype)


def multihead_conv1d(x: Tensor, filters: Tensor, runs: Tensor | None = None) -> Tensor:
    """The same through torch's `conv1d`: heads are its channels, channels of a head its batch.

    Documents are drawn W−1 zeros apart before and closed up after, so that no window sees two.
    """
    time, window = x.shape[1], filters.shape[0]
    if runs is not None:
        # Documents are numbered from 0 in each row: [B, T], the place of each token.
        places = torch.arange(time, device=x.device) + runs * (window - 1)
        places = places[:, :, None, None].expand_as(x)
        spread = x.new_zeros(x.shape[0], int(places.max()) + 1, *x.shape[2:])
        x = spread.scatter(1, places, x)
    batch, length, heads, width = x.shape
    inputs = x.permute(0, 3, 2, 1).reshape(batch * width, heads, length)
    # conv1d correlates: its last tap meets the newest input.
    weight = filters.permute(1, 2, 0).flip(2)
    y = F.conv1d(F.pad(inputs, (window - 1, 0)), weight)
    y = y.view(batch, width, heads, length).permute(0, 3, 2, 1)
    return y if runs is None else y.gather(1, places)
