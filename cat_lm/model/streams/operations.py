"""A layer's streams as projections make them, and the operations on one, [B, T, heads, D].

Projections are packed, as GPT-NeoX's, or one for each stream. Operations are filters of W taps and
filters as long as the text, further ranks of filters, norms, SiLU, rotation: `pipeline` lists a
layer's. Those with parameters have a `name`, by which, after the stream's, they are the pipeline's,
and say how these change nothing (`initial`) and start (`drawn`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.core.parameters import NothingDecays
from cat_lm.model.context import Context
from cat_lm.model.sequence import SequenceGroup
from cat_lm.ops.convolution import kinds
from cat_lm.ops.convolution.api import convolve, rotate
from cat_lm.ops.convolution.kinds import STREAMS
from cat_lm.ops.convolution.kinds.reference import check_kind
from cat_lm.ops.convolution.qkv import STREAM_SLICES
from cat_lm.ops.long_filter import filters as long_filters
from cat_lm.ops.long_filter.api import continued, long_conv

if TYPE_CHECKING:
    from cat_lm.model.attention.settings import AttentionSettings

RANK_START = 2.0**-6  # a power of two, which is exact in half precision
_EPSILON = 1e-6  # added to the mean square


# A norm of queries or keys x [B, T, heads, D] of a stream, of all heads or those of a group's rank.
Normalize = Callable[[Tensor, str, SequenceGroup | None], Tensor]


class SeparateStreams:
    """Streams [B, T, heads, D] of a projection each; keys and values may have fewer heads."""

    def __init__(self, parts: dict[str, Tensor], biases: dict[str, Tensor | None]) -> None:
        self._parts, self._biases = parts, biases

    def parts(self) -> dict[str, Tensor]:
        """Return the streams by letter."""
        return self._parts

    def biases(self) -> dict[str, Tensor | None]:
        """Return the biases [heads, D] by letter."""
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
        """Set the filters' inputs to zero at padding."""
        real = {s: context.without_padding(self._parts[s]) for s in streams}
        return SeparateStreams(self._parts | real, self._biases)

    def contiguous(self) -> SeparateStreams:
        return SeparateStreams({s: x.contiguous() for s, x in self._parts.items()}, self._biases)

    def stored(self, streams: str) -> dict[str, Tensor]:
        """Return the tensors that the decoding state stores for the streams, by name."""
        return {stream: self._parts[stream] for stream in streams}

    def split_stored(self, stored: dict[str, Tensor], streams: str) -> dict[str, Tensor]:
        """Split the stored tensors into one for each stream."""
        return stored


class PackedStreams(SeparateStreams):
    """Streams packed as GPT-NeoX packs them, [B, T, H, 3, D], with biases [H, 3, D].

    They are unpacked by `unbind` and not by indexing, whose backward pass would fill a gradient
    with zeros for each stream.
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

    def split_stored(self, stored: dict[str, Tensor], streams: str) -> dict[str, Tensor]:
        return {s: stored["qkv"][:, :, :, number] for number, s in enumerate(streams)}


@dataclass
class LayerPass:
    """One forward pass over a layer's streams, with the tensors that operations read.

    Attributes:
        weights: the pipeline, which holds the operations' parameters.
        streams: as filters read them.
        norm: the norm of queries and keys, if the model has one.
        context: the context of the layer.
        inputs: the streams by their letters, [B, T, heads, D], once they are unpacked.
        biases: of the projections, [heads, D], which come after the filters; None for none.
        earlier: the inputs before `inputs`, [B, W−1, heads, D], of streams that have some.
    """

    weights: nn.Module
    streams: SeparateStreams
    norm: Normalize | None
    context: Context
    inputs: dict[str, Tensor] = field(default_factory=dict)
    biases: dict[str, Tensor | None] = field(default_factory=dict)
    earlier: dict[str, Tensor] = field(default_factory=dict)
    stored_before: dict[str, Tensor] | None = None

    def exchange(self) -> dict[str, Tensor]:
        """Store these inputs in the state, and return the W−1 inputs before them, by name."""
        if self.stored_before is None:
            window, names = self.weights.window, self.weights.filtered
            read = self.streams.stored(names) if window > 1 and names else {}
            found = {n: self.context.inputs_before(n, x, window) for n, x in read.items()}
            self.stored_before = {name: x for name, x in found.items() if x is not None}
        return self.stored_before

    def unpack_streams(self) -> None:
        """Unpack each stream's inputs and biases, and the inputs before them."""
        before, names = self.exchange(), self.weights.filtered
        self.inputs, self.biases = self.streams.parts(), self.streams.biases()
        self.earlier = self.streams.split_stored(before, names) if before else {}


# Changes x [B, T, heads, D] of a stream, which it may widen.
StreamOp = Callable[[Tensor, str, LayerPass], Tensor]


def add_bias(x: Tensor, stream: str, layer: LayerPass) -> Tensor:
    bias = layer.biases[stream]
    return x if bias is None else x + bias.to(x.dtype)


def normalize(x: Tensor, stream: str, layer: LayerPass) -> Tensor:
    """Normalise queries or keys after their convolution."""
    return layer.norm(x, stream, layer.context.group)


def silu(x: Tensor, stream: str, layer: LayerPass) -> Tensor:
    return F.silu(x)


def activate(x: Tensor, stream: str, layer: LayerPass) -> Tensor:
    """Pass through the SiLU that all three streams end in, convolved or not."""
    return F.silu(x)


class Convolution:
    """Convolves a stream along time, and adds its projection's bias (CAT, Definition 1).

    For head h and lags j = 0 … W−1 (zeros before the start), with one filter for each head
    (`conv_type: head`):

        y[b,t,h,:] = bias_h + sum_j F[h,j] x[b,t−j,h,:],   x = hidden · Wᵀ_h

    which is (F * X) W + b of the paper's definition: a filter that the channels of a head share
    commutes with the projection, and the bias is added after the convolution. The other kinds are
    in `cat_lm.ops.convolution.kinds`. With `conv_norm: l1` a filter is divided by its magnitudes'
    sum, `Kind.normalized`.
    """

    name = "filter"

    def __init__(self, config: AttentionSettings) -> None:
        self.kind = kinds.chosen(config)
        # Kernels take names; a kind with options has no kernel.
        self.conv_type = self.kind if self.kind.Options else self.kind.name
        self.settings, self.window = config, config.conv_window
        axes = self.kind.filter_axes
        self.head_axis = axes.index("H") if "H" in axes and not self.kind.mixes_heads else None

    def initial(self, stream: str) -> Tensor:
        """Build identity filters. Raises ValueError for a kind without an identity."""
        check_kind(self.kind)
        config = self.settings
        shape = config.stream_heads(stream), config.stream_width(stream), self.window
        return self.kind.identity(*shape)

    def drawn(self, stream: str) -> Tensor:
        start, way = self.initial(stream), self.settings.conv_init
        if way == "identity":
            return start
        bound = 1 / math.sqrt(self.kind.fan_in(self.settings.stream_heads(stream), self.window))
        drawn = torch.empty_like(start).uniform_(-bound, bound)
        return drawn if way == "uniform" else start + drawn

    def used(self, filters: Tensor) -> Tensor:
        return self.kind.normalized(filters) if self.settings.conv_norm == "l1" else filters

    def __call__(
        self, x: Tensor, stream: str, layer: LayerPass, rotary: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Convolve x, and rotate the result if `rotary` has the angles."""
        filters = layer.weights.taps(stream, layer.context.group)
        return self.by(filters, stream, layer, layer.biases[stream], rotary)

    def by(
        self,
        filters: Tensor,
        stream: str,
        layer: LayerPass,
        bias: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Convolve a stream's inputs with `filters`."""
        context = layer.context
        return convolve(
            self.conv_type,
            layer.inputs[stream],
            filters,
            bias,
            rotary=rotary,
            document_ids=context.documents,
            positions=context.document_positions,
            initial_state=layer.earlier.get(stream),
            backend=context.conv_backend,
        )


class LongFilter:
    """Convolves a stream over all lags j ≤ t, and adds its projection's bias.

    A filter is O(N) numbers that `cat_lm.ops.long_filter` computes F from: `kind` is what they
    mean, N is `size`. They stay in fp32, as half precision has no rates near 0.
    """

    name = "filter"
    window, head_axis = 1, 0  # No inputs are stored, and each head has its own parameters.

    def __init__(self, config: AttentionSettings) -> None:
        self.settings, self.size = config, config.conv_state
        self.kind = long_filters.get(config.conv_filter)

    def initial(self, stream: str) -> Tensor:
        return self.kind.identity(self.settings.stream_heads(stream), self.size)

    def drawn(self, stream: str) -> Tensor:
        heads = self.settings.stream_heads(stream)
        return self.kind.start_as(self.settings.conv_init, heads, self.size)

    def used(self, numbers: Tensor) -> Tensor:
        return numbers

    def __call__(self, x: Tensor, stream: str, layer: LayerPass) -> Tensor:
        numbers = layer.weights.taps(stream, layer.context.group)
        return self.by(numbers, x, layer.biases[stream], stream, layer.context)

    def by(
        self, numbers: Tensor, x: Tensor, bias: Tensor | None, name: str, context: Context
    ) -> Tensor:
        """Convolve x [B, T, heads, D], zero at padding, with filters of parameters [heads, P].

        A row that ends in padding is continued from the state after its last real token.

        Args:
            bias: [heads, D].
            name: the name of the filters' state in the layer's state, which is updated.
        """
        modes, state = self.kind.modes_of(numbers, self.size), context.state
        backend = context.conv_backend
        if state is None:
            where = {"document_ids": context.documents, "positions": context.document_positions}
            return long_conv(x, modes, bias, **where, backend=backend)
        before = state.recurrent.get(name)
        outputs, after = continued(x, modes, bias, before, context.padding, backend)
        state.replace_recurrent(name, after)
        return outputs


class Ranks:
    """Filters queries and keys R times, and concatenates the results, [B, T, H, R·D].

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

    drawn = initial

    def __call__(self, x: Tensor, stream: str, layer: LayerPass) -> Tensor:
        """Append the outputs of the further filters to x, the first filter's output."""
        further = layer.weights.rank_taps(stream, layer.context.group)[1:]
        others = [self.convolution.by(filters, stream, layer) for filters in further.unbind(0)]
        return torch.cat([x, *others], dim=-1)


class QueryKeyNorm(NothingDecays):
    """Holds the weights of `qk_norm`, and normalises queries or keys before the rotation.

    For head h, with x̂ = x / |x| and rms(x) = x / sqrt(sum(x²) / D) over the D channels of a head
    (or those of all its ranks):

        l2:  the logits are s_h q̂·k̂, with s_h learned from sqrt(D) (Henry et al., 2020)
        rms: q and k are rms(x) · w, with weights w of D channels each (Qwen3's)

    both before the temperature divides the logits. It may come before the convolution; then what is
    normalised has the projection's bias, and the convolution adds none.
    """

    def __init__(self, config: AttentionSettings):
        super().__init__()
        self.heads, self.width = config.num_attention_heads, config.head_width
        self.scales = config.qk_norm == "l2"
        for name, values in self.initial_values().items():
            self.register_parameter(name, nn.Parameter(values))

    def initial_values(self) -> dict[str, Tensor]:
        if self.scales:
            return {"logit_scale": torch.full((self.heads,), math.sqrt(self.width))}
        return {"q_weight": torch.ones(self.width), "k_weight": torch.ones(self.width)}

    def forward(self, x: Tensor, stream: str, group: SequenceGroup | None = None) -> Tensor:
        """Normalise queries or keys [B, T, heads, D]; `group` are the ranks that share heads."""
        weight = None if self.scales else getattr(self, f"{stream}_weight").to(x.dtype)
        ranks = x.shape[-1] // self.width
        if ranks == 1:
            x = F.rms_norm(x, x.shape[-1:], weight, _EPSILON)
        else:
            x = F.rms_norm(x, x.shape[-1:], None, _EPSILON / ranks) / math.sqrt(ranks)
            x = x if weight is None else x * weight.repeat(ranks)
        if not self.scales or stream == "k":
            return x
        scale = self.logit_scale
        if x.shape[2] < self.heads:  # Select the weights of this rank's heads.
            scale = group.slice_own(scale)
        # rms(q)·rms(k) / sqrt(D) = sqrt(D) q̂·k̂.
        return x * (scale / math.sqrt(self.width))[:, None].to(x.dtype)


class Rotation:
    """Rotates heads of D channels, each rank of R·D alike, if the context has angles."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, x: Tensor, stream: str, layer: LayerPass) -> Tensor:
        rotary, backend = layer.context.rotary, layer.context.conv_backend
        if rotary is None:
            return x
        rank = x.shape[3] // self.width
        if rank == 1:
            return rotate(x, *rotary, backend=backend)
        ranks = x.unflatten(3, (rank, self.width)).flatten(2, 3)
        ranks = rotate(ranks, *rotary, backend=backend)
        return ranks.unflatten(2, (-1, rank)).flatten(3)
