"""Filters of queries, keys and values, what they make of one stream, and how they start."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.core.parameters import NothingDecays
from cat_lm.model.context import Context
from cat_lm.model.long_convolution import convolve_long
from cat_lm.model.qk_norm import QueryKeyNorm
from cat_lm.model.sequence import SequenceGroup, own_heads
from cat_lm.ops import convolve, rotate
from cat_lm.ops.convolution import kinds
from cat_lm.ops.convolution.kinds import STREAMS
from cat_lm.ops.convolution.maps import mixed_values
from cat_lm.ops.convolution.reference import check_kind
from cat_lm.ops.convolution.step import can_step, convolve_step
from cat_lm.ops.long_filter import filters as long_filters

if TYPE_CHECKING:
    from cat_lm.model.attention.settings import AttentionSettings

RANK_START = 2.0**-6  # exact in half precision too


def identity_filters(config: AttentionSettings, stream: str) -> Tensor:
    """Make a stream's filters that change nothing, of the shape of their kind.

    Raises:
        ValueError: the kind is none that there can be.
    """
    heads = config.stream_heads(stream)
    if config.has_long_filters:
        return long_filters.get(config.conv_filter).identity(heads, config.conv_state)
    kind = kinds.get(config.conv_type)
    check_kind(kind)
    return kind.identity(heads, config.stream_width(stream), config.conv_window)


def first_filters(config: AttentionSettings, stream: str) -> Tensor:
    """Draw a stream's filters as they start, by `conv_init`."""
    heads, kind = config.stream_heads(stream), kinds.get(config.conv_type)
    if config.has_long_filters:
        long_filter = long_filters.get(config.conv_filter)
        return long_filter.start_as(config.conv_init, heads, config.conv_state)
    start = identity_filters(config, stream)
    if config.conv_init == "identity":
        return start
    bound = 1 / math.sqrt(kind.fan_in(heads, config.conv_window))
    drawn = torch.empty_like(start).uniform_(-bound, bound)
    return drawn if config.conv_init == "uniform" else start + drawn


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


class StreamConvolution(NothingDecays):
    """Hold the filters and biases of a layer's queries, keys and values, and convolve them.

    For stream s in {q, k, v}, head h and lags j = 0 … W−1 (zeros before the start), with one filter
    for each head (`conv_type: head`):

        y_s[b,t,h,:] = bias_{s,h} + sum_j F_s[h,j] x_s[b,t−j,h,:],   x_s = hidden · Wᵀ_{s,h}

    which is (F_s * X) W_s + b of the paper's definition: a filter that the channels of a head share
    commutes with the projection, and the bias is added after the convolution. With one filter for
    each pair of heads (`conv_type: multihead`), which has to follow the projection, as before it
    all heads read the same X:

        y_s[b,t,i,:] = bias_{s,i} + sum_h sum_j F_s[j,i,h] x_s[b,t−j,h,:]

    (`conv_mixing: maps` uses the values' filters otherwise: see `MapMixingCore`.) With
    one filter for each channel (`conv_type: depthwise`), and with `conv_activation: silu` its SiLU:

        y_s[b,t,h,d] = bias_{s,h,d} + sum_j F_s[h,d,j] x_s[b,t−j,h,d]

    With `conv_rank: R` (`head`) queries and keys are filtered R times, by `…_rank_filter` beyond
    the first, and set side by side, [B, T, H, R·D]. Their scores are then q·k / sqrt(D) convolved
    over queries and keys with a kernel of rank R: for all f, g and S[i,j] = q_i·k_j,

        (f * q)_i · (g * k)_j = sum_ab f[a] g[b] S[i−a, j−b]

    as in multi-token attention (Golovneva et al., 2025), whose kernel has full rank and meets
    masked scores. Only the first rank has biases. With `conv_norm: l1` a filter is divided by its
    magnitudes' sum, `Kind.normalized`.

    With `conv_filter` other than `taps` the sum is over all lags j ≤ t, and a filter is O(N)
    numbers that `cat_lm.ops.long_filter` computes F from: `long_filter` is their kind, N is
    `state_size`.

    Queries and keys are then rotated. The projections stay plain linear layers, so that what
    replaces or adapts linear layers (LoRA, quantisation) means the same as in any other model. This
    module holds the filters `q_filter`, `k_filter`, `v_filter`, taps with lag 0 first, and the
    projections' biases, and its forward reads no other parameters: whoever gathers a module's
    parameters before its forward (ZeRO-3, FSDP) gathers all that it needs.

    Args:
        biases: of the projections, by the names that they get here; None where there is none.
    """

    def __init__(self, config: AttentionSettings, biases: Mapping[str, nn.Parameter | None]):
        super().__init__()
        self.conv_type = config.conv_type
        kind = kinds.get(config.conv_type)
        self.mixes_heads = kind.mixes_heads
        axes = ("H",) if config.has_long_filters else kind.filter_axes
        self.head_axis = axes.index("H") if "H" in axes else None
        self.window, self.long_filter = config.conv_window, None
        if config.has_long_filters:
            self.long_filter = long_filters.get(config.conv_filter)
        self.state_size = config.conv_state
        self.streams = config.convolved_streams
        self.embedding_streams = config.embedding_streams
        self.activation = config.conv_activation
        self.head_width, self.rank = config.head_width, config.conv_rank
        self.mixes_maps = config.mixes_maps
        self.normalizes = config.conv_norm == "l1"
        self.norm_comes_first = config.qk_norm_place == "before"
        for name, bias in biases.items():
            self.register_parameter(name, bias)
        for stream in self.streams:
            filters = nn.Parameter(identity_filters(config, stream))
            self.register_parameter(f"{stream}_filter", filters)
        for stream in "qk" if self.rank > 1 else "":
            filters = nn.Parameter(rank_start(config, stream))
            self.register_parameter(f"{stream}_rank_filter", filters)

    def filters(self) -> dict[str, nn.Parameter]:
        """Return the filters of the streams that have them, in the order q, k, v."""
        return {stream: getattr(self, f"{stream}_filter") for stream in self.streams}

    def taps(self, stream: str, group: SequenceGroup | None = None) -> Tensor | None:
        """Return a stream's filters as they are used, of its heads here; None where it has none.

        Args:
            group: the ranks that share the heads.
        """
        filters = getattr(self, f"{stream}_filter", None)
        if filters is None:
            return None
        filters = self._own(filters, group, self.head_axis)
        return kinds.get(self.conv_type).normalized(filters) if self.normalizes else filters

    def _own(self, x: Tensor, group: SequenceGroup | None, dim: int | None = 0) -> Tensor:
        """Cut what heads have along `dim` to those computed here, which are all where they mix."""
        whole = dim is None or self.mixes_heads
        return x if whole else own_heads(group, x, dim)

    def biases(self) -> list[nn.Parameter]:
        """Return the projections' biases that there are."""
        return [own for name, own in self.named_parameters(recurse=False) if name.endswith("bias")]

    def _long(
        self, numbers: Tensor, x: Tensor, bias: Tensor | None, name: str, context: Context
    ) -> Tensor:
        """[B, T, H, D] convolved by long filters of numbers [H, P]; see `convolve_long`."""
        modes = self.long_filter.modes_of(numbers, self.state_size)
        return convolve_long(modes, x, bias, name, context)

    def _stream(
        self,
        stream: str,
        inputs: Tensor,
        bias: Tensor | None,
        rotary: tuple[Tensor, Tensor] | None,
        context: Context,
        initial_state: Tensor | None,
    ) -> Tensor:
        """One stream [B, T, H, D], convolved by itself; bias [H, D], rotary of `_fused_rotary`."""
        if stream not in self.embedding_streams:
            return self._unconvolved(inputs, bias)
        outputs = convolve(
            self.conv_type,
            inputs,
            self.taps(stream, context.group),
            bias,
            rotary=rotary,
            document_ids=context.documents,
            positions=context.document_positions,
            initial_state=initial_state,
            backend=context.conv_backend,
        )
        return F.silu(outputs) if self.activation == "silu" else outputs

    @staticmethod
    def _unconvolved(inputs: Tensor, bias: Tensor | None) -> Tensor:
        return inputs if bias is None else inputs + bias.to(inputs.dtype)

    def _ranked(
        self,
        stream: str,
        first: Tensor,
        inputs: Tensor,
        context: Context,
        initial_state: Tensor | None,
    ) -> Tensor:
        """Set what the further ranks' filters make beside the first's, [B, T, H, R·D]."""
        if self.rank == 1 or stream == "v":
            return first
        further = self._own(getattr(self, f"{stream}_rank_filter"), context.group, 1)
        others = [
            convolve(
                self.conv_type,
                inputs,
                taps,
                document_ids=context.documents,
                positions=context.document_positions,
                initial_state=initial_state,
                backend=context.conv_backend,
            )
            for taps in further.unbind(0)
        ]
        return torch.cat([first, *others], dim=-1)

    def convolve_one(
        self,
        stream: str,
        inputs: Tensor,
        bias: Tensor | None,
        rotary: tuple[Tensor, Tensor] | None,
        context: Context,
    ) -> Tensor:
        """Convolve a stream [B, T, H, D] after its inputs in the state, under its own name there.

        Args:
            bias: [H, D].
            rotary: of `_fused_rotary`.
        """
        before = None
        if stream in self.embedding_streams:
            inputs = context.without_padding(inputs)
            if self.long_filter is not None:
                return self._long(self.taps(stream, context.group), inputs, bias, stream, context)
            if self.window > 1:
                before = context.inputs_before(stream, inputs, self.window)
        first = self._stream(stream, inputs, bias, rotary, context, before)
        return self._ranked(stream, first, inputs, context, before)

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

    def _fused_rotary(
        self,
        stream: str,
        rotary: tuple[Tensor, Tensor] | None,
        norm: QueryKeyNorm | None,
    ) -> tuple[Tensor, Tensor] | None:
        """Return the angles if a stream's convolution turns what it makes; else `_turned` does."""
        is_last = norm is None and self.rank == 1 and self.activation != "silu"
        is_last = is_last and self.long_filter is None
        turns = is_last and stream in self.embedding_streams and stream != "v"
        return rotary if turns else None

    def _turned(
        self,
        query: Tensor,
        key: Tensor,
        norm: QueryKeyNorm | None,
        context: Context,
    ) -> tuple[Tensor, Tensor]:
        """Normalise and rotate queries and keys as far as that is not done."""
        rotary = context.rotary
        if norm is not None:
            query, key = norm(query, key, context.group)
        if rotary is not None:
            query, key = (
                x if self._fused_rotary(stream, rotary, norm) else self._rotated(x, context)
                for stream, x in (("q", query), ("k", key))
            )
        return query, key

    def _rotated(self, x: Tensor, context: Context) -> Tensor:
        """Rotate [B, T, H, R·D], every rank alike."""
        rotary, backend = context.rotary, context.conv_backend
        if self.rank == 1:
            return rotate(x, *rotary, backend=backend)
        ranks = x.unflatten(3, (self.rank, self.head_width)).flatten(2, 3)
        ranks = rotate(ranks, *rotary, backend=backend)
        return ranks.unflatten(2, (-1, self.rank)).flatten(3)

    def _can_step(self, inputs: Tensor, context: Context) -> bool:
        """Return True if inputs [B, T, H, …, D] are a token that one kernel convolves."""
        return (
            inputs.shape[1] == 1
            and context.padding is None
            and bool(self.embedding_streams)
            and self.long_filter is None
            and self.rank == 1
            and not (torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()))
            and can_step(self.conv_type, inputs, self.window, context.conv_backend)
        )

    def _step(
        self,
        inputs: Sequence[Tensor],
        past: Sequence[Tensor | None],
        biases: Sequence[Tensor | None],
        following: Sequence[Tensor | None],
        rotary: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, ...]:
        """Queries, keys and values of one token, rotated; `past` and `following` by stream."""
        return convolve_step(
            self.conv_type,
            inputs,
            past,
            [self.taps(stream) if stream in self.embedding_streams else None for stream in STREAMS],
            biases,
            following,
            window=self.window,
            rotary=rotary,
            silu=self.activation == "silu",
        )
