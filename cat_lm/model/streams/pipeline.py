"""A layer's streams from projections to attention: operations, and the kernels that fuse them."""

from __future__ import annotations

from torch import Tensor

from cat_lm.model.context import Context
from cat_lm.model.sequence import SequenceGroup, own_heads
from cat_lm.model.streams.base import PackedStreams, SeparateStreams
from cat_lm.model.streams.fusions import FUSIONS
from cat_lm.model.streams.layer_pass import LayerPass
from cat_lm.model.streams.norm import QueryKeyNorm
from cat_lm.model.streams.weights import StreamWeights
from cat_lm.ops.convolution.kinds import STREAMS
from cat_lm.ops.convolution.maps import mixed_values


class StreamPipeline(StreamWeights):
    """Computes queries, keys and values: by a kernel of `fusions`, then by one operation each."""

    def forward(
        self, context: Context, *projected: Tensor, norm: QueryKeyNorm | None = None
    ) -> tuple[Tensor, ...]:
        """Compute the streams.

        Filters read zeros at padding and across documents, and the last W−1 inputs of the state
        before these.

        Args:
            projected: what the projections make without biases: packed [B, T, H·3·D], for each head
                its queries, keys and values, or three, [B, T, heads · D] each.
            norm: of queries and keys.

        Returns:
            Queries, keys and values, each [B, T, its heads, D], the first two R times as wide. If
            maps are mixed, a fourth tensor follows, see `with_maps`.
        """
        streams = self._split(projected, context.group)
        if norm is not None and self.norm_comes_first:
            streams = streams.normalized(norm, context.group)
        streams = streams.without_padding(context, self.filtered)
        layer = LayerPass(self, streams, norm, context)
        made, done = {}, {}
        for fusion in FUSIONS:
            if (found := fusion(layer)) is not None:
                made, done = found
                break
        finished = (layer.finish(s, made.get(s), done.get(s, 0)) for s in STREAMS)
        return self.with_maps(tuple(finished), context)

    def _split(
        self, projected: tuple[Tensor, ...], group: SequenceGroup | None
    ) -> SeparateStreams | PackedStreams:
        own = None if self.mixes_heads else group  # which computes all heads where they mix
        if self.is_packed:
            (packed,) = projected
            width, bias = self.widths["q"], self.bias
            if bias is not None:
                bias = own_heads(own, bias.view(-1, 3, width))
            return PackedStreams(packed.view(*packed.shape[:2], -1, 3, width), bias)
        parts, biases = {}, {}
        for stream, x in zip(STREAMS, projected, strict=True):
            bias, width = getattr(self, f"{stream}_bias", None), self.widths[stream]
            parts[stream] = x.unflatten(2, (-1, width))
            biases[stream] = None if bias is None else own_heads(own, bias.view(-1, width))
        return SeparateStreams(parts, biases)

    def with_maps(self, streams: tuple[Tensor, ...], context: Context) -> tuple[Tensor, ...]:
        """Add what the mixing of maps takes beside queries, keys and values, if maps are mixed.

        These are the `mixed_values` [B, T, H, H D], or, after a cache, the values' filters
        [W, H, H], with which `attend_mixing_maps` goes on. Values are then zero at padding.
        """
        if not self.mixes_maps:
            return streams
        query, key, value = streams
        value, filters = context.without_padding(value), self.taps("v", context.group)
        if context.continues:
            # A copy, because an engine may take the parameter away after this forward.
            return query, key, value, filters.clone()
        documents, positions = context.documents, context.document_positions
        mixed = mixed_values(value, filters, documents, context.conv_backend, positions)
        return query, key, value, mixed
