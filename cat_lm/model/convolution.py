"""Causal convolutions along time between the query, key and value projection and attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.model.cache import LayerStateMixin
from cat_lm.model.qk_norm import QueryKeyNorm
from cat_lm.model.stream_convolution import StreamConvolution, inputs_before
from cat_lm.ops import head_conv_qkv
from cat_lm.ops.convolution import kinds
from cat_lm.ops.convolution.kinds import STREAMS
from cat_lm.ops.convolution.maps import mixed_values
from cat_lm.ops.convolution.qkv import STREAM_SLICES

if TYPE_CHECKING:
    from cat_lm.model.hf.settings import AttentionSettings


class PackedConvolution(StreamConvolution):
    """Convolve GPT-NeoX's `query_key_value`, add its `bias` [3 C], rotate."""

    def __init__(self, config: AttentionSettings, bias: nn.Parameter | None):
        super().__init__(config, {"bias": bias})
        self.mixes_maps = config.mixes_maps

    def forward(
        self,
        projected: Tensor,
        rotary: tuple[Tensor, Tensor] | None = None,
        padding_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        state: LayerStateMixin | None = None,
        follows_cache: bool = False,
        document_positions: Tensor | None = None,
        norm: QueryKeyNorm | None = None,
    ) -> tuple[Tensor, ...]:
        """Convolve and rotate.

        Args:
            projected: what the projection makes without a bias, [B, T, H·3·D]: for each head its
                queries, keys and values, as GPT-NeoX packs them.
            rotary: cosines and sines, [B or 1, T, rotated channels]; None for no rotation.
            padding_mask: [B, T] bool, False at padding, which the convolution reads as zeros.
            document_ids: [B, T]; the convolution reads zeros across a change of the id.
            state: the layer's cache; its last W−1 inputs stand before these, and it is updated.
            follows_cache: for the mixing of maps, whether attention also reads cached values.
            document_positions: [B, T] int32, each token's in its document, if known already.
            norm: of queries and keys, before or after the convolution as the configuration says.

        Returns:
            Queries, keys and values, each [B, T, H, D], the first two R times as wide. If maps are
            mixed, values are zero at padding, and a fourth tensor follows: `mixed_values` of them
            [B, T, H, H D], or, after a cache, the values' filters [W, H, H], with which
            `attend_mixing_maps` goes on.
        """
        projected = projected.view(*projected.shape[:2], -1, 3, self.head_width)
        bias = None
        if self.bias is not None:
            bias = self._own(self.bias.view(-1, 3, self.head_width))
        if norm is not None and self.norm_comes_first:
            projected, bias, norm = *self._normalized(projected, bias, norm), None
        if padding_mask is not None:
            projected = projected.masked_fill(~padding_mask[:, :, None, None, None], 0.0)
        streams = None
        if norm is None:
            streams = self._next_token(projected, bias, rotary, padding_mask, state)
        if streams is None:
            documents = document_ids, document_positions
            streams = self._sequence(projected, bias, rotary, padding_mask, *documents, state, norm)
        if not self.mixes_maps:
            return streams
        query, key, value = streams
        if padding_mask is not None:
            value = value.masked_fill(~padding_mask[:, :, None, None], 0.0)
        if follows_cache:
            # A copy, because an engine may take the parameter away after this forward.
            return query, key, value, self.taps("v").clone()
        mixed = mixed_values(
            value, self.taps("v"), document_ids, self.conv_backend, document_positions
        )
        return query, key, value, mixed

    def _next_token(
        self,
        projected: Tensor,
        bias: Tensor | None,
        rotary: tuple[Tensor, Tensor] | None,
        padding_mask: Tensor | None,
        state: LayerStateMixin | None,
    ) -> tuple[Tensor, ...] | None:
        """Queries, keys and values of [B, 1, H, 3, D]; None where it takes more than a kernel."""
        past = None if state is None else state.newest_inputs("qkv", self.window)
        if past is None or not self._can_step(projected, padding_mask):
            return None
        rows = min(past.shape[1] + 1, self.window - 1)
        following = past.new_empty(past.shape[0], rows, *past.shape[2:])
        streams = self._step(
            projected.contiguous().unbind(3),
            [self._part_of(past.contiguous(), stream) for stream in STREAMS],
            (None,) * len(STREAMS) if bias is None else bias.unbind(1),
            [self._part_of(following, stream) for stream in STREAMS],
            rotary,
        )
        state.replace_inputs("qkv", following)
        return streams

    def _sequence(
        self,
        projected: Tensor,
        bias: Tensor | None,
        rotary: tuple[Tensor, Tensor] | None,
        padding_mask: Tensor | None,
        document_ids: Tensor | None,
        document_positions: Tensor | None,
        state: LayerStateMixin | None,
        norm: QueryKeyNorm | None,
    ) -> tuple[Tensor, ...]:
        """Queries, keys and values of [B, T, H, 3, D], after what the state holds."""
        if self.long_filter is not None:
            how = {"document_ids": document_ids, "positions": document_positions, "state": state}
            *turned, value = self._long_streams(projected, bias, padding_mask=padding_mask, **how)
            return *self._turned(*turned, norm, rotary), value
        initial_state = self._exchange_state(projected, padding_mask, state)
        if self.conv_type == kinds.HEAD.name:  # one kernel for all three streams
            turns_later = norm is not None or self.rank > 1
            query, key, value = head_conv_qkv(
                projected,
                [self.taps(stream) for stream in STREAMS],
                bias,
                rotary=None if turns_later else rotary,
                document_ids=document_ids,
                positions=document_positions,
                initial_state=initial_state,
                backend=self.conv_backend,
            )
            if not turns_later:
                return query, key, value
            documents = document_ids, document_positions
            query, key = (
                self._ranked(
                    stream, first, inputs, *documents, self._part_of(initial_state, stream)
                )
                for stream, first, inputs in zip(
                    "qk", (query, key), projected.unbind(3)[:2], strict=True
                )
            )
            return *self._turned(query, key, norm, rotary), value
        # Not by index: the backward pass would fill a whole gradient with zeros for each stream.
        biases = (None,) * len(STREAMS) if bias is None else bias.unbind(1)
        query, key, value = (
            self._stream(
                stream,
                inputs,
                own_bias,
                self._fused_rotary(stream, rotary, norm),
                document_ids,
                document_positions,
                self._part_of(initial_state, stream),
            )
            for stream, inputs, own_bias in zip(STREAMS, projected.unbind(3), biases, strict=True)
        )
        return *self._turned(query, key, norm, rotary), value

    def _long_streams(
        self, projected: Tensor, bias: Tensor | None, **how: Any
    ) -> tuple[Tensor, ...]:
        """Queries, keys and values of [B, T, H, 3, D] by long filters, all heads in one call."""
        streams = self.embedding_streams
        chosen = STREAM_SLICES[streams]
        # [B, T, H, S, D] is [B, T, H·S, D] with H·S filters.
        numbers = torch.stack([self.taps(stream) for stream in streams], dim=1).flatten(0, 1)
        own_bias = None if bias is None else bias[:, chosen].flatten(0, 1)
        inputs = projected[:, :, :, chosen].flatten(2, 3)
        outputs = self._long(numbers, inputs, own_bias, name="qkv", **how)
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
        projected: Tensor, bias: Tensor | None, norm: QueryKeyNorm
    ) -> tuple[Tensor, Tensor | None]:
        """Normalise the queries and keys of [B, T, H, 3, D] with their biases, which are then 0."""
        query, key, value = projected.unbind(3)
        if bias is not None:
            own = bias.to(projected.dtype)
            query, key = query + own[:, 0], key + own[:, 1]
            bias = F.pad(bias[:, 2:], (0, 0, 2, 0))
        return torch.stack([*norm(query, key), value], dim=3), bias

    def _exchange_state(
        self, projected: Tensor, padding_mask: Tensor | None, state: LayerStateMixin | None
    ) -> Tensor | None:
        """The W−1 inputs before these, [B, W−1, H, S, D], of the S streams convolved here."""
        if state is None or self.window == 1 or not self.embedding_streams:
            return None
        inputs = projected[:, :, :, STREAM_SLICES[self.embedding_streams]]
        return inputs_before(state, "qkv", inputs, self.window, padding_mask)

    def _part_of(self, initial_state: Tensor | None, stream: str) -> Tensor | None:
        if initial_state is None or stream not in self.embedding_streams:
            return None
        return initial_state[:, :, :, self.embedding_streams.index(stream)]


class SeparateConvolution(StreamConvolution):
    """Convolve `q_proj`, `k_proj` and `v_proj`, add `q_bias`, `k_bias`, `v_bias`, rotate.

    Keys and values may have fewer heads than queries, and then have as many filters fewer.
    """

    def __init__(self, config: AttentionSettings, biases: Mapping[str, nn.Parameter | None]):
        super().__init__(config, {f"{stream}_bias": biases[stream] for stream in STREAMS})

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary: tuple[Tensor, Tensor] | None = None,
        padding_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        state: LayerStateMixin | None = None,
        document_positions: Tensor | None = None,
        norm: QueryKeyNorm | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Convolve and rotate.

        Args:
            query, key, value: what the projections make without biases, [B, T, heads · D] each.
            rotary, padding_mask, document_ids, state, document_positions, norm: as of
                `PackedConvolution`.

        Returns:
            Queries, keys and values, each [B, T, its heads, D], the first two R times as wide.
        """
        inputs = {
            stream: projected.unflatten(2, (-1, self.head_width))
            for stream, projected in zip(STREAMS, (query, key, value), strict=True)
        }
        biases = {stream: self._bias(stream) for stream in STREAMS}
        if norm is not None and self.norm_comes_first:
            whole = (
                x if (bias := biases.pop(stream)) is None else x + bias.to(x.dtype)
                for stream, x in inputs.items()
                if stream in "qk"
            )
            inputs["q"], inputs["k"] = norm(*whole)
            norm = None
        if norm is None:
            streams = self._next_token(inputs, biases, rotary, padding_mask, state)
            if streams is not None:
                return streams
        documents = document_ids, document_positions
        query, key, value = (
            self._one(
                stream,
                x,
                biases.get(stream),
                self._fused_rotary(stream, rotary, norm),
                padding_mask,
                *documents,
                state,
            )
            for stream, x in inputs.items()
        )
        return *self._turned(query, key, norm, rotary), value

    def _bias(self, stream: str) -> Tensor | None:
        """A stream's bias [its heads, D]."""
        bias = getattr(self, f"{stream}_bias")
        return None if bias is None else self._own(bias.view(-1, self.head_width))

    def _next_token(
        self,
        projected: Mapping[str, Tensor],
        biases: Mapping[str, Tensor | None],
        rotary: tuple[Tensor, Tensor] | None,
        padding_mask: Tensor | None,
        state: LayerStateMixin | None,
    ) -> tuple[Tensor, ...] | None:
        """Queries, keys and values of a token; None where it takes more than a kernel."""
        streams = self.embedding_streams
        held = {} if state is None else {s: state.newest_inputs(s, self.window) for s in streams}
        inputs = [x.contiguous() for x in projected.values()]
        if None in held.values() or not held or not self._can_step(inputs[0], padding_mask):
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
            rotary,
        )
        for stream, newest in following.items():
            state.replace_inputs(stream, newest)
        return outputs

    def _one(
        self,
        stream: str,
        inputs: Tensor,
        bias: Tensor | None,
        rotary: tuple[Tensor, Tensor] | None,
        padding_mask: Tensor | None,
        document_ids: Tensor | None,
        document_positions: Tensor | None,
        state: LayerStateMixin | None,
    ) -> Tensor:
        before = None
        if stream in self.embedding_streams:
            if padding_mask is not None:
                inputs = inputs.masked_fill(~padding_mask[:, :, None, None], 0.0)
            if self.long_filter is not None:
                return self._long(
                    self.taps(stream), inputs, bias,
                    name=stream, padding_mask=padding_mask, document_ids=document_ids,
                    positions=document_positions, state=state,
                )  # fmt: skip
            if state is not None and self.window > 1:
                before = inputs_before(state, stream, inputs, self.window, padding_mask)
        documents = document_ids, document_positions
        first = self._stream(stream, inputs, bias, rotary, *documents, before)
        return self._ranked(stream, first, inputs, *documents, before)
