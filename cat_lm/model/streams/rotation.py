"""Rotary positions of a stream, and SiLU: what needs no parameters."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from cat_lm.model.streams.base import StreamCall, StreamOp
from cat_lm.ops import rotate


class Rotation(StreamOp):
    """Rotates heads of D channels, every rank of R·D alike, where the context has angles."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, x: Tensor, call: StreamCall) -> Tensor:
        rotary, backend = call.context.rotary, call.context.conv_backend
        if rotary is None:
            return x
        rank = x.shape[3] // self.width
        if rank == 1:
            return rotate(x, *rotary, backend=backend)
        ranks = x.unflatten(3, (rank, self.width)).flatten(2, 3)
        ranks = rotate(ranks, *rotary, backend=backend)
        return ranks.unflatten(2, (-1, rank)).flatten(3)


class Silu(StreamOp):
    """Passes a stream through SiLU."""

    def __call__(self, x: Tensor, call: StreamCall) -> Tensor:
        return F.silu(x)


class Activation(Silu):
    """The SiLU that all three streams end in, convolved or not."""
