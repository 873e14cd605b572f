"""Causal convolutions along time between the query, key and value projection and attention."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.model.cache import LayerStateMixin
from cat_lm.model.qk_norm import QueryKeyNorm
from cat_lm.model.rules import STREAMS
from cat_lm.model.settings import AttentionSettings
from cat_lm.ops import convolve, head_conv_qkv, rotate
from cat_lm.ops.convolution import kinds
from cat_lm.ops.convolution.maps import mixed_values
from cat_lm.ops.convolution.qkv import STREAM_SLICES
from cat_lm.ops.convolution.reference import check_kind

RANK_START = 2.0**-6  # exact in half precision too


def identity_filters(config: AttentionSettings, stream: str) -> Tensor:
    """Make a stream's filters that change nothing, of the shape of their kind.

    Raises:
        ValueError: the kind is none that there can be.
    """
    kind = kinds.get(config.conv_type)
    check_kind(kind)
    return kind.identity(config.stream_heads(stream), config.head_width, config.conv_window)


def rank_start(config: AttentionSettings, stream: str) -> Tensor:
    """Make the filters of a kernel's further ranks as they start, [R−1, H, W].

    The keys' are zeros, so that the scores are those of rank 1. The queries' are small, and another
    tap in each rank, so that gradients tell the ranks apart.
    """
    kind, heads = kinds.HEAD, config.stream_heads(stream)
    shape = kind.filter_shape(heads, config.head_width, config.conv_window)
    start = torch.zeros(config.conv_rank - 1, *shape)
    if stream == "q":
        start.diagonal(offset=1, dim1=0, dim2=2).fill_(RANK_START)
    return start


class StreamConvolution(nn.Module):
    """Hold the filters and biases of a layer's queries, keys and values, and convolve them.

    For stream s in {q, k, v}, head h and lags j = 0 … W−1 (zeros before the start), with one filter
    for each head (`conv_type: head`):

        y_s[b,t,h,:] = bias_{s,h} + sum_j F_s[h,j] x_s[b,t−j,h,:],   x_s = hidden · Wᵀ_{s,h}

    which is (F_s * X) W_s + b of the paper's definition: a filter that the channels of a head share
    commutes with the projection, and the bias is added after the convolution. With one filter for
    each pair of heads (`conv_type: multihead`), which has to follow the projection, as before it
    all heads read the same X:

        y_s[b,t,i,:] = bias_{s,i} + sum_h sum_j F_s[j,i,h] x_s[b,t−j,h,:]

    (`conv_mixing: maps` uses the values' filters otherwise: see `cat_lm.model.map_mixing`.) With
    one filter for each channel (`conv_type: depthwise`), and with `conv_activation: silu` its SiLU:

        y_s[b,t,h,d] = bias_{s,h,d} + sum_j F_s[h,d,j] x_s[b,t−j,h,d]

    With `conv_rank: R` (`head`) queries and keys are filtered R times, by `…_rank_filter` beyond
    the first, and set side by side, [B, T, H, R·D]. Their scores are then q·k / sqrt(D) convolved
    over queries and keys with a kernel of rank R: for all f, g and S[i,j] = q_i·k_j,

        (f * q)_i · (g * k)_j = sum_ab f[a] g[b] S[i−a, j−b]

    as in multi-token attention (Golovneva et al., 2025), whose kernel has full rank and meets
    masked scores. Only the first rank has biases. With `conv_norm: l1` a filter is divided by its
    magnitudes' sum, `Kind.normalized`.

    Queries and keys are then rotated. The projections stay plain linear layers, so that what
    replaces or adapts linear layers (LoRA, quantisation) means the same as in any other model. This
    module holds the filters `q_filter`, `k_filter`, `v_filter`, lag 0 first, and the
    projections' biases, and its forward reads no other parameters: whoever gathers a module's
    parameters before its forward (ZeRO-3, FSDP) gathers all that it needs.

    Args:
        biases: of the projections, by the names that they get here; None where there is none.
    """

    no_decay = (
        "bias",
        *(f"{stream}_bias" for stream in STREAMS),
        *(f"{stream}_filter" for stream in STREAMS),
        *(f"{stream}_rank_filter" for stream in "qk"),
    )

    def __init__(self, config: AttentionSettings, biases: Mapping[str, nn.Parameter | None]):
        super().__init__()
        self.conv_type = config.conv_type
        self.window = config.conv_window
        self.streams = config.convolved_streams
        self.embedding_streams = config.embedding_streams
        self.activation = config.conv_activation
        self.head_width, self.rank = config.head_width, config.conv_rank
        self.normalizes = config.conv_norm == "l1"
        self.norm_comes_first = config.qk_norm_place == "before"
        self.conv_backend = "auto"
        for name, bias in biases.items():
            self.register_parameter(name, bias)
        for stream in self.streams:
            filters = nn.Parameter(identity_filters(config, stream))
            self.register_parameter(f"{stream}_filter", filters)
        for stream in "qk" if self.rank > 1 else "":
            filters = nn.Parameter(rank_start(config, stream))
            self.register_parameter(f"{stream}_rank_filter", filters)

    def filters(self) -> dict[str, nn.Parameter]:
        """Give the filters of the streams that have them, in the order q, k, v."""
        return {stream: getattr(self, f"{stream}_filter") for stream in self.streams}

    def taps(self, stream: str) -> Tensor | None:
        """Give a stream's filters as they are used; None where it has none."""
        filters = getattr(self, f"{stream}_filter", None)
        if filters is None or not self.normalizes:
            return filters
        return kinds.get(self.conv_type).normalized(filters)

    def biases(self) -> list[nn.Parameter]:
        """Give the projections' biases that there are."""
        return [own for name, own in self.named_parameters(recurse=False) if name.endswith("bias")]

    def _stream(
        self,
        stream: str,
        inputs: Tensor,
        bias: Tensor | None,
        document_ids: Tensor | None,
        initial_state: Tensor | None,
    ) -> Tensor:
        """One stream [B, T, H, D], convolved by itself, before rotation; bias [H, D]."""
        if stream not in self.embedding_streams:
            return inputs if bias is None else inputs + bias.to(inputs.dtype)
        outputs = convolve(
            self.conv_type,
            inputs,
            self.taps(stream),
            bias,
            document_ids=document_ids,
            initial_state=initial_state,
            backend=self.conv_backend,
        )
        return F.silu(outputs) if self.activation == "silu" else outputs

    def _ranked(
        self,
        stream: str,
        first: Tensor,
        inputs: Tensor,
        document_ids: Tensor | None,
        initial_state: Tensor | None,
    ) -> Tensor:
        """Set what the further ranks' filters make beside the first's, [B, T, H, R·D]."""
        if self.rank == 1 or stream == "v":
            return first
        others = [
            convolve(
                self.conv_type,
                inputs,
                taps,
                document_ids=document_ids,
                initial_state=initial_state,
                backend=self.conv_backend,
            )
            for taps in getattr(self, f"{stream}_rank_filter").unbind(0)
        ]
        return torch.cat([first, *others], dim=-1)

    def _turned(
        self,
        query: Tensor,
        key: Tensor,
        norm: QueryKeyNorm | None,
        rotary: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        """Normalise and rotate queries and keys."""
        if norm is not None:
            query, key = norm(query, key)
        if rotary is not None:
            query, key = self._rotated(query, rotary), self._rotated(key, rotary)
        return query, key

    def _rotated(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate [B, T, H, R·D], every rank alike."""
        if self.rank == 1:
            return rotate(x, *rotary)
        ranks = x.unflatten(3, (self.rank, self.head_width)).flatten(2, 3)
        return rotate(ranks, *rotary).unflatten(2, (-1, self.rank)).flatten(3)


class PackedConvolution(StreamConvolution):
    """Convolve GPT-NeoX's `query_key_value`, add its `bias` [3 C], rotate."""

    def __init__(self, config: AttentionSettings, bias: nn.Parameter | None):
        super().__init__(config, {"bias": bias})
        self.num_heads = config.num_attention_heads
        self.mixes_maps = config.mixes_maps

    def forward(
        self,
        projected: Tensor,
        rotary: tuple[Tensor, Tensor] | None = None,
        padding_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        state: LayerStateMixin | None = None,
        follows_cache: bool = False,
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
            norm: of queries and keys, before or after the convolution as the configuration says.

        Returns:
            Queries, keys and values, each [B, T, H, D], the first two R times as wide. If maps are
            mixed, values are zero at padding, and a fourth tensor follows: `mixed_values` of them
            [B, T, H, H D], or, after a cache, the values' filters [W, H, H], with which
            `attend_mixing_maps` goes on.
        """
        projected = projected.view(*projected.shape[:2], self.num_heads, 3, -1)
        bias = None if self.bias is None else self.bias.view(self.num_heads, 3, -1)
        if norm is not None and self.norm_comes_first:
            projected, bias, norm = *self._normalized(projected, bias, norm), None
        if padding_mask is not None:
            projected = projected.masked_fill(~padding_mask[:, :, None, None, None], 0.0)
        initial_state = self._exchange_state(projected, padding_mask, state)

        if self.conv_type == kinds.HEAD.name:  # one kernel for all three streams
            turns_later = norm is not None or self.rank > 1
            query, key, value = head_conv_qkv(
                projected,
                [self.taps(stream) for stream in STREAMS],
                bias,
                rotary=None if turns_later else rotary,
                document_ids=document_ids,
                initial_state=initial_state,
                backend=self.conv_backend,
            )
            if turns_later:
                query, key = (
                    self._ranked(
                        stream, first, inputs, document_ids, self._part_of(initial_state, stream)
                    )
                    for stream, first, inputs in zip(
                        "qk", (query, key), projected.unbind(3)[:2], strict=True
                    )
                )
                query, key = self._turned(query, key, norm, rotary)
            return query, key, value
        # Not by index: the backward pass would fill a whole gradient with zeros for each stream.
        biases = (None,) * len(STREAMS) if bias is None else bias.unbind(1)
        query, key, value = (
            self._stream(
                stream, inputs, own_bias, document_ids, self._part_of(initial_state, stream)
            )
            for stream, inputs, own_bias in zip(STREAMS, projected.unbind(3), biases, strict=True)
        )
        query, key = self._turned(query, key, norm, rotary)
        if not self.mixes_maps:
            return query, key, value
        if padding_mask is not None:
            value = value.masked_fill(~padding_mask[:, :, None, None], 0.0)
        if follows_cache:
            # A copy, because an engine may take the parameter away after this forward.
            return query, key, value, self.taps("v").clone()
        mixed = mixed_values(value, self.taps("v"), document_ids, self.conv_backend)
        return query, key, value, mixed

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
        return state.exchange_inputs("qkv", inputs, self.window, padding_mask)

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
        norm: QueryKeyNorm | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Convolve and rotate.

        Args:
            query, key, value: what the projections make without biases, [B, T, heads · D] each.
            rotary, padding_mask, document_ids, state, norm: as for `PackedConvolution`.

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
        query, key, value = (
            self._one(stream, x, biases.get(stream), padding_mask, document_ids, state)
            for stream, x in inputs.items()
        )
        return *self._turned(query, key, norm, rotary), value

    def _bias(self, stream: str) -> Tensor | None:
        """A stream's bias [its heads, D]."""
        bias = getattr(self, f"{stream}_bias")
        return None if bias is None else bias.view(-1, self.head_width)

    def _one(
        self,
        stream: str,
        inputs: Tensor,
        bias: Tensor | None,
        padding_mask: Tensor | None,
        document_ids: Tensor | None,
        state: LayerStateMixin | None,
    ) -> Tensor:
        before = None
        if stream in self.embedding_streams:
            if padding_mask is not None:
                inputs = inputs.masked_fill(~padding_mask[:, :, None, None], 0.0)
            if state is not None and self.window > 1:
                before = state.exchange_inputs(stream, inputs, self.window, padding_mask)
        first = self._stream(stream, inputs, bias, document_ids, before)
        return self._ranked(stream, first, inputs, document_ids, before)
