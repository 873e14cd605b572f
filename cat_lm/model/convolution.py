"""Causal convolutions along time between the query, key and value projection and attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.model.context import Context
from cat_lm.model.qk_norm import QueryKeyNorm
from cat_lm.model.sequence import SequenceGroup
from cat_lm.model.stream_convolution import StreamConvolution
from cat_lm.ops import head_conv_qkv
from cat_lm.ops.convolution import kinds
from cat_lm.ops.convolution.kinds import STREAMS
from cat_lm.ops.convolution.qkv import STREAM_SLICES

if TYPE_CHECKING:
    from cat_lm.model.attention.settings import AttentionSettings


class PackedConvolution(StreamConvolution):
    """Convolve GPT-NeoX's `query_key_value`, add its `bias` [3 C], rotate."""

    def __init__(self, config: AttentionSettings, bias: nn.Parameter | None):
        super().__init__(config, {"bias": bias})

    def forward(
        self,
        projected: Tensor,
        context: Context,
        norm: QueryKeyNorm | None = None,
    ) -> tuple[Tensor, ...]:
        """Convolve and rotate.

        The convolution reads zeros at padding and across documents, and the last W−1 inputs of the
        state before these.

        Args:
            projected: what the projection makes without a bias, [B, T, H·3·D]: for each head its
                queries, keys and values, as GPT-NeoX packs them.
            norm: of queries and keys, before or after the convolution as the configuration says.

        Returns:
            Queries, keys and values, each [B, T, H, D], the first two R times as wide. If maps are
            mixed, a fourth tensor follows, see `with_maps`.
        """
        projected = projected.view(*projected.shape[:2], -1, 3, self.head_width)
        bias = None
        if self.bias is not None:
            bias = self._own(self.bias.view(-1, 3, self.head_width), context.group)
        if norm is not None and self.norm_comes_first:
            projected, bias, norm = *self._normalized(projected, bias, norm, context), None
        projected = context.without_padding(projected)
        streams = None
        if norm is None:
            streams = self._next_token(projected, bias, context)
        if streams is None:
            streams = self._sequence(projected, bias, context, norm)
        return self.with_maps(streams, context)

    def _next_token(
        self,
        projected: Tensor,
        bias: Tensor | None,
        context: Context,
    ) -> tuple[Tensor, ...] | None:
        """Queries, keys and values of [B, 1, H, 3, D]; None where it takes more than a kernel."""
        state = context.state
        past = None if state is None else state.newest_inputs("qkv", self.window)
        if past is None or not self._can_step(projected, context):
            return None
        rows = min(past.shape[1] + 1, self.window - 1)
        following = past.new_empty(past.shape[0], rows, *past.shape[2:])
        streams = self._step(
            projected.contiguous().unbind(3),
            [self._part_of(past.contiguous(), stream) for stream in STREAMS],
            (None,) * len(STREAMS) if bias is None else bias.unbind(1),
            [self._part_of(following, stream) for stream in STREAMS],
            context.rotary,
        )
        state.replace_inputs("qkv", following)
        return streams

    def _sequence(
        self,
        projected: Tensor,
        bias: Tensor | None,
        context: Context,
        norm: QueryKeyNorm | None,
    ) -> tuple[Tensor, ...]:
        """Queries, keys and values of [B, T, H, 3, D], after what the state holds."""
        rotary = context.rotary
        if self.long_filter is not None:
            *turned, value = self._long_streams(projected, bias, context)
            return *self._turned(*turned, norm, context), value
        initial_state = self._exchange_state(projected, context)
        if self.conv_type == kinds.HEAD.name:  # one kernel for all three streams
            turns_later = norm is not None or self.rank > 1
            query, key, value = head_conv_qkv(
                projected,
                [self.taps(stream, context.group) for stream in STREAMS],
                bias,
                rotary=None if turns_later else rotary,
                document_ids=context.documents,
                positions=context.document_positions,
                initial_state=initial_state,
                backend=context.conv_backend,
            )
            if not turns_later:
                return query, key, value
            query, key = (
                self._ranked(stream, first, inputs, context, self._part_of(initial_state, stream))
                for stream, first, inputs in zip(
                    "qk", (query, key), projected.unbind(3)[:2], strict=True
                )
            )
            return *self._turned(query, key, norm, context), value
        # Not by index: the backward pass would fill a whole gradient with zeros for each stream.
        biases = (None,) * len(STREAMS) if bias is None else bias.unbind(1)
        query, key, value = (
            self._stream(
                stream,
                inputs,
                own_bias,
                self._fused_rotary(stream, rotary, norm),
                context,
                self._part_of(initial_state, stream),
            )
            for stream, inputs, own_bias in zip(STREAMS, projected.unbind(3), biases, strict=True)
        )
        return *self._turned(query, key, norm, context), value

    def _long_streams(
        self, projected: Tensor, bias: Tensor | None, context: Context
    ) -> tuple[Tensor, ...]:
        """Queries, keys and values of [B, T, H, 3, D] by long filters, all heads in one call."""
        streams = self.embedding_streams
        chosen = STREAM_SLICES[streams]
        # [B, T, H, S, D] is [B, T, H·S, D] with H·S filters.
        numbers = torch.stack([self.taps(s, context.group) for s in streams], dim=1).flatten(0, 1)
        own_bias = None if bias is None else bias[:, chosen].flatten(0, 1)
        inputs = projected[:, :, :, chosen].flatten(2, 3)
        outputs = self._long(numbers, inputs, own_bias, "qkv", context)
        convolved = dict(
            zip(streams, outputs.unflatten(2, (-1, len(streams))).unbind(3), strict=True)
        )
        biases = (None,) * len(STREAMS) if bias is None else bias.unbind(1)
        return tuple(
            convolved[stream] if stream in convolved else self._unconvolved(inputs, own)
            for stream, inputs, own in zip(STREAMS, projected.unbind(3), biases, strict=True)
        )

    @staticmethod
    def _normalized(
        projected: Tensor, bias: Tensor | None, norm: QueryKeyNorm, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        """Normalise the queries and keys of [B, T, H, 3, D] with their biases, which are then 0."""
        query, key, value = projected.unbind(3)
        if bias is not None:
            own = bias.to(projected.dtype)
            query, key = query + own[:, 0], key + own[:, 1]
            bias = F.pad(bias[:, 2:], (0, 0, 2, 0))
        return torch.stack([*norm(query, key, context.group), value], dim=3), bias

    def _exchange_state(self, projected: Tensor, context: Context) -> Tensor | None:
        """The W−1 inputs before these, [B, W−1, H, S, D], of the S streams convolved here."""
        if self.window == 1 or not self.embedding_streams:
            return None
        inputs = projected[:, :, :, STREAM_SLICES[self.embedding_streams]]
        return context.inputs_before("qkv", inputs, self.window)

    def _part_of(self, initial_state: Tensor | None, stream: str) -> Tensor | None:
        if initial_state is None or stream not in self.embedding_streams:
            return None
        return initial_state[:, :, :, self.embedding_streams.index(stream)]


class SeparateConvolution(StreamConvolution):
    """Convolve `q_proj`, `k_proj` and `v_proj`, add `q_bias`, `k_bias`, `v_bias`, rotate.

    Keys and values may have fewer heads than queries, and then have as many filters fewer.
    """

    def __init__(self, config: AttentionSettings, biases: Mapping[str, nn.Parameter | None]):
        super().__init__(config, {f"{stream}_bias": biases.get(stream) for stream in STREAMS})
        self.widths = {stream: config.stream_width(stream) for stream in STREAMS}

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: Context,
        norm: QueryKeyNorm | None = None,
        activation: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Convolve and rotate, as `PackedConvolution`.

        Args:
            query, key, value: what the projections make without biases, [B, T, heads · D] each.
            activation: of all three streams, convolved or not.

        Returns:
            Queries, keys and values, each [B, T, its heads, D], the first two R times as wide; if
            maps are mixed, a fourth tensor follows, see `with_maps`.
        """
        inputs = {
            stream: projected.unflatten(2, (-1, self.widths[stream]))
            for stream, projected in zip(STREAMS, (query, key, value), strict=True)
        }
        biases = {stream: self._bias(stream, context.group) for stream in STREAMS}
        if norm is not None and self.norm_comes_first:
            whole = (
                x if (bias := biases.pop(stream)) is None else x + bias.to(x.dtype)
                for stream, x in inputs.items()
                if stream in "qk"
            )
            inputs["q"], inputs["k"] = norm(*whole, context.group)
            norm = None
        if norm is None:
            streams = self._next_token(inputs, biases, context)
            if streams is not None:
                return self._finished(streams, activation, context)
        rotary = context.rotary
        query, key, value = (
            self.convolve_one(
                stream, x, biases.get(stream), self._fused_rotary(stream, rotary, norm), context
            )
            for stream, x in inputs.items()
        )
        streams = *self._turned(query, key, norm, context), value
        return self._finished(streams, activation, context)

    def _finished(
        self,
        streams: tuple[Tensor, ...],
        activation: Callable[[Tensor], Tensor] | None,
        context: Context,
    ) -> tuple[Tensor, ...]:
        if activation is not None:
            streams = tuple(map(activation, streams))
        return self.with_maps(streams, context)

    def _bias(self, stream: str, group: SequenceGroup | None) -> Tensor | None:
        """A stream's bias [its heads, D]."""
        bias = getattr(self, f"{stream}_bias")
        return None if bias is None else self._own(bias.view(-1, self.widths[stream]), group)

    def _next_token(
        self,
        projected: Mapping[str, Tensor],
        biases: Mapping[str, Tensor | None],
        context: Context,
    ) -> tuple[Tensor, ...] | None:
        """Queries, keys and values of a token; None where it takes more than a kernel."""
        streams, state = self.embedding_streams, context.state
        held = {} if state is None else {s: state.newest_inputs(s, self.window) for s in streams}
        inputs = [x.contiguous() for x in projected.values()]
        if len(set(self.widths.values())) > 1:
            return None
        if None in held.values() or not held or not self._can_step(inputs[0], context):
            return None
        following = {}
        for stream, past in held.items():
            rows = min(past.shape[1] + 1, self.window - 1)
            following[stream] = past.new_empty(past.shape[0], rows, *past.shape[2:])
        outputs = self._step(
            inputs,
            [held[s].contiguous() if s in held else None for s in STREAMS],
            [biases.get(stream) for stream in STREAMS],
            [following.get(stream) for stream in STREAMS],
            context.rotary,
        )
        for stream, newest in following.items():
            state.replace_inputs(stream, newest)
        return outputs
