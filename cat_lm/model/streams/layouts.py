"""Queries, keys and values as projections make them: packed, as GPT-NeoX's, or one for each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.model.context import Context
from cat_lm.model.sequence import SequenceGroup
from cat_lm.ops.convolution.kinds import STREAMS
from cat_lm.ops.convolution.qkv import STREAM_SLICES

# A norm of queries or keys x [B, T, heads, D] of a stream, of all heads or those of a group's rank.
Normalize = Callable[[Tensor, str, SequenceGroup | None], Tensor]


class SeparateStreams:
    """Streams [B, T, heads, D] of a projection each; keys and values may have fewer heads."""

    def __init__(self, parts: dict[str, Tensor], biases: dict[str, Tensor | None]) -> None:
        self._parts, self._biases = parts, biases

    def parts(self) -> dict[str, Tensor]:
        """Return the streams by their letters."""
        return self._parts

    def biases(self) -> dict[str, Tensor | None]:
        """Return their biases [heads, D]."""
        return self._biases

    def normalized(self, norm: Normalize, group: SequenceGroup | None) -> SeparateStreams:
        """Normalise queries and keys with their biases, which are then 0."""
        made = {
            s: norm(x if self._biases[s] is None else x + self._biases[s].to(x.dtype), s, group)
            for s, x in self._parts.items()
            if s in "qk"
        }
        return SeparateStreams(self._parts | made, {"q": None, "k": None, "v": self._biases["v"]})

    def without_padding(self, context: Context, streams: str) -> SeparateStreams:
        """Put zeros at padding into what filters read."""
        real = {s: context.without_padding(self._parts[s]) for s in streams}
        return SeparateStreams(self._parts | real, self._biases)

    def contiguous(self) -> SeparateStreams:
        """Return the same without gaps in memory."""
        return SeparateStreams({s: x.contiguous() for s, x in self._parts.items()}, self._biases)

    def stored(self, streams: str) -> dict[str, Tensor]:
        """Return what a decoding state keeps of the streams, by its names there."""
        return {stream: self._parts[stream] for stream in streams}

    def apart(self, stored: dict[str, Tensor], streams: str) -> dict[str, Tensor]:
        """Return each stream's part of what a decoding state keeps."""
        return stored


class PackedStreams(SeparateStreams):
    """Streams packed as GPT-NeoX packs them, [B, T, H, 3, D], with biases [H, 3, D].

    Taken apart they are not indexed: the backward pass would fill a whole gradient with zeros for
    each.
    """

    def __init__(self, packed: Tensor, bias: Tensor | None) -> None:
        self.packed, self.bias = packed, bias

    def parts(self) -> dict[str, Tensor]:
        return dict(zip(STREAMS, self.packed.unbind(3), strict=True))

    def biases(self) -> dict[str, Tensor | None]:
        if self.bias is None:
            return dict.fromkeys(STREAMS)
        return dict(zip(STREAMS, self.bias.unbind(1), strict=True))

    def normalized(self, norm: Normalize, group: SequenceGroup | None) -> PackedStreams:
        found = SeparateStreams(self.parts(), self.biases()).normalized(norm, group)
        bias = None if self.bias is None else F.pad(self.bias[:, 2:], (0, 0, 2, 0))
        return PackedStreams(torch.stack(list(found.parts().values()), dim=3), bias)

    def without_padding(self, context: Context, streams: str) -> PackedStreams:
        return PackedStreams(context.without_padding(self.packed), self.bias)

    def contiguous(self) -> PackedStreams:
        return PackedStreams(self.packed.contiguous(), self.bias)

    def stored(self, streams: str) -> dict[str, Tensor]:
        return {"qkv": self.packed[:, :, :, STREAM_SLICES[streams]]}

    def apart(self, stored: dict[str, Tensor], streams: str) -> dict[str, Tensor]:
        return {s: stored["qkv"][:, :, :, number] for number, s in enumerate(streams)}
