"""Filters of further ranks: a kernel of scores that is no product of two filters (`conv_rank`)."""

from __future__ import annotations

import torch
from torch import Tensor

from cat_lm.model.sequence import own_heads
from cat_lm.model.streams.base import StreamCall, StreamOp
from cat_lm.model.streams.convolution import Convolution

RANK_START = 2.0**-6  # exact in half precision too


class Ranks(StreamOp):
    """Filters queries and keys R times, and sets the results side by side, [B, T, H, R·D].

    Their scores are then q·k / sqrt(D) convolved over queries and keys with a kernel of rank R: for
    all f, g and S[i,j] = q_i·k_j,

        (f * q)_i · (g * k)_j = sum_ab f[a] g[b] S[i−a, j−b]

    as in multi-token attention (Golovneva et al., 2025), whose kernel has full rank and meets
    masked scores. Only the first rank has biases.
    """

    name = "rank_filter"

    def __init__(self, convolution: Convolution) -> None:
        self.convolution, self.rank = convolution, convolution.settings.conv_rank

    def initial(self, stream: str) -> Tensor:
        """Make the filters of the further ranks as they start, [R−1, H, W].

        The keys' are zeros, so that the scores are those of rank 1. The queries' are small, and
        another tap in each rank, so that gradients tell the ranks apart.
        """
        filters = self.convolution.initial(stream)
        start = torch.zeros(self.rank - 1, *filters.shape)
        if stream == "q":
            start.diagonal(offset=1, dim1=0, dim2=2).fill_(RANK_START)
        return start

    def __call__(self, x: Tensor, call: StreamCall) -> Tensor:
        """Set what the further filters make of the inputs beside x, which the first made."""
        further = getattr(call.weights, f"{call.stream}_{self.name}")
        further = own_heads(call.context.group, further, 1)
        others = [self.convolution.by(filters, call) for filters in further.unbind(0)]
        return torch.cat([x, *others], dim=-1)
