"""A layer's streams from projections to attention: operations, and the kernels that fuse them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from cat_lm.core.parameters import NothingDecays
from cat_lm.model.context import Context
from cat_lm.model.sequence import SequenceGroup, own_heads
from cat_lm.model.streams.operations import (
    Convolution,
    LayerPass,
    LongFilter,
    PackedStreams,
    QueryKeyNorm,
    Ranks,
    Rotation,
    SeparateStreams,
    StreamOp,
    activate,
    add_bias,
    normalize,
    silu,
)
from cat_lm.ops.convolution import kinds
from cat_lm.ops.convolution.kinds import STREAMS
from cat_lm.ops.convolution.maps import mix_values
from cat_lm.ops.convolution.qkv import STREAM_SLICES, convolve_qkv
from cat_lm.ops.convolution.step import can_step, convolve_step

if TYPE_CHECKING:
    from cat_lm.model.attention.settings import AttentionSettings

# The streams by letter, and the number of operations done on each.
Made = tuple[dict[str, Tensor], dict[str, int]]


def filter_of(config: AttentionSettings) -> Convolution | LongFilter:
    return LongFilter(config) if config.has_long_filters else Convolution(config)


class StreamPipeline(NothingDecays):
    """Computes queries, keys and values: first by a kernel of `FUSIONS`, then one operation at a
    time.

    A stream with filters is convolved, filtered further where ranks are asked for, activated,
    normalised and rotated, as the configuration says; one without gets its bias in the place of the
    first of these. The norm may come before all of them. (`conv_mixing: maps` uses the values'
    filters otherwise: see `MapMixingCore`.)

    The projections stay plain linear layers, so that what replaces or adapts linear layers (LoRA,
    quantisation) means the same as in any other model. This module holds the filters `q_filter`,
    `k_filter`, `v_filter`, taps with lag 0 first, and the projections' biases, and its forward
    reads no other parameters: whoever gathers a module's parameters before its forward (ZeRO-3,
    FSDP) gathers all that it needs.

    Args:
        biases: of the projections, by the names that they get here; None where there is none. One
            of GPT-NeoX's packed projection is `bias` [3 C], and others `q_bias`, `k_bias`,
            `v_bias`.
        activates: whether all three streams, convolved or not, end in a SiLU.
    """

    def __init__(
        self,
        config: AttentionSettings,
        biases: Mapping[str, nn.Parameter | None],
        activates: bool = False,
    ) -> None:
        super().__init__()
        self.filter, self.streams = filter_of(config), config.convolved_streams
        self.filtered, self.window = config.embedding_streams, self.filter.window
        self.widths = {stream: config.stream_width(stream) for stream in STREAMS}
        self.is_packed, self.mixes_maps = "bias" in biases, config.mixes_maps
        self.norm_comes_first = config.qk_norm_place == "before"
        ranks = [Ranks(self.filter)] if config.conv_rank > 1 else []
        # The operations with parameters, and the streams that have them.
        self.named = [(self.filter, self.streams), *((op, "qk") for op in ranks)]
        for name, bias in biases.items():
            self.register_parameter(name, bias)
        for op, streams in self.named:
            for stream in streams:
                self.register_parameter(f"{stream}_{op.name}", nn.Parameter(op.initial(stream)))
        normalizes = config.qk_norm != "none" and not self.norm_comes_first
        self.operations: dict[str, tuple[StreamOp, ...]] = {}
        for s in STREAMS:
            is_filtered, meets_keys = s in self.filtered, s in "qk"
            rotates = meets_keys and config.position_embedding == "rope"
            self.operations[s] = (
                self.filter if is_filtered else add_bias,
                *(ranks if meets_keys else []),
                *([silu] if is_filtered and config.conv_activation == "silu" else []),
                *([normalize] if meets_keys and normalizes else []),
                *([Rotation(self.widths[s])] if rotates else []),
                *([activate] if activates else []),
            )
        self.step_lengths = {s: _step_length(ops) for s, ops in self.operations.items()}

    @property
    def mixes_heads(self) -> bool:
        """Return True if a head's output depends on other heads."""
        return isinstance(self.filter, Convolution) and self.filter.kind.mixes_heads

    def filters(self) -> dict[str, nn.Parameter]:
        """Return the filters of the streams that have them, in the order q, k, v."""
        return {stream: getattr(self, f"{stream}_filter") for stream in self.streams}

    def taps(self, stream: str, group: SequenceGroup | None = None) -> Tensor | None:
        """Return the effective filters of a stream for this rank's heads; None without filters.

        Args:
            group: the ranks that share the heads.
        """
        filters = getattr(self, f"{stream}_filter", None)
        if filters is None:
            return None
        if stream in "qk" and len(self.named) > 1:
            return self.rank_taps(stream, group)[0]
        axis = self.filter.head_axis
        return self.filter.used(filters if axis is None else own_heads(group, filters, axis))

    def rank_taps(self, stream: str, group: SequenceGroup | None = None) -> Tensor:
        """Return the effective filters of all ranks of a stream, [R, heads here, W].

        `conv_norm: l1` divides a head's by the magnitudes' sum of them all.
        """
        first = own_heads(group, getattr(self, f"{stream}_filter"), 0)
        further = own_heads(group, getattr(self, f"{stream}_{Ranks.name}"), 1)
        taps = torch.cat([first[None], further])
        if self.filter.settings.conv_norm == "none":
            return taps
        return taps / taps.abs().sum((0, 2), keepdim=True).clamp(min=1e-12)

    def draw_initial_values(self) -> dict[str, Tensor]:
        """Draw the initial values of all parameters, by name."""
        drawn = {f"{s}_{op.name}": op.drawn(s) for op, streams in self.named for s in streams}
        own = self.named_parameters(recurse=False)
        return {n: torch.zeros_like(p) for n, p in own if n.endswith("bias")} | drawn

    def forward(
        self, context: Context, *projected: Tensor, norm: QueryKeyNorm | None = None
    ) -> tuple[Tensor, ...]:
        """Compute the streams.

        Filters read zeros at padding and across documents, and the last W−1 inputs of the state
        before these.

        Args:
            projected: what the projections make without biases: packed [B, T, H·3·D], for each head
                its queries, keys and values, or three, [B, T, heads · D] each.
            norm: the norm of queries and keys.

        Returns:
            Queries, keys and values, each [B, T, its heads, D], the first two R times as wide. If
            maps are mixed, a fourth tensor follows, see `_with_maps`.
        """
        streams = self._split(projected, context.group)
        if norm is not None and self.norm_comes_first:
            streams = streams.normalized(norm, context.group)
        streams = streams.without_padding(context, self.filtered)
        layer = LayerPass(self, streams, norm, context)
        made, done = {}, {}
        for fusion in FUSIONS:
            if fusion.serves(self) and (found := fusion.run(layer)) is not None:
                made, done = found
                break
        if any(done.get(s, 0) < len(self.operations[s]) for s in STREAMS):
            made = self._finish(layer, made, done)
        return self._with_maps(tuple(made[s] for s in STREAMS), context)

    def _split(
        self, projected: tuple[Tensor, ...], group: SequenceGroup | None
    ) -> SeparateStreams | PackedStreams:
        own = None if self.mixes_heads else group  # A kind that mixes heads computes all of them.
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

    def _finish(
        self, layer: LayerPass, made: dict[str, Tensor], done: dict[str, int]
    ) -> dict[str, Tensor]:
        layer.unpack_streams()
        finished = layer.inputs | made
        for s in STREAMS:
            rest = self.operations[s][done.get(s, 0) :]
            while rest:
                if fuses_rotation(rest):
                    finished[s] = rest[0](finished[s], s, layer, rotary=layer.context.rotary)
                    rest = rest[2:]
                else:
                    finished[s], rest = rest[0](finished[s], s, layer), rest[1:]
        return finished

    def _with_maps(self, streams: tuple[Tensor, ...], context: Context) -> tuple[Tensor, ...]:
        """Add what the mixing of maps takes beside queries, keys and values, if maps are mixed.

        These are the `mix_values` [B, T, H, H D], or, after a cache, the values' filters
        [W, H, H], with which `MapMixingCore` goes on. Values are then zero at padding.
        """
        if not self.mixes_maps:
            return streams
        query, key, value = streams
        value, filters = context.without_padding(value), self.taps("v", context.group)
        if context.continues:
            # A copy, because an engine may take the parameter away after this forward.
            return query, key, value, filters.clone()
        documents, positions = context.documents, context.document_positions
        groups = filters.shape[1] // value.shape[2]  # the number of query heads that share values
        read = value if groups == 1 else value.repeat_interleave(groups, dim=2)
        mixed = mix_values(read, filters, documents, context.conv_backend, positions)
        return query, key, value, mixed


def _step_length(operations: tuple[StreamOp, ...]) -> int | None:
    """Return how many operations the one-token kernel computes; None if it cannot run first."""
    rest = [op for op in operations if op is not activate]
    able = all(op in (add_bias, silu) or isinstance(op, Convolution | Rotation) for op in rest)
    return len(rest) if able else None


def _is_one_kernel(weights: StreamPipeline) -> bool:
    has_taps = isinstance(weights.filter, Convolution) and bool(weights.filtered)
    are_covered = None not in weights.step_lengths.values()
    return has_taps and are_covered and len(set(weights.widths.values())) == 1


def _one_token(layer: LayerPass) -> Made | None:
    weights, context = layer.weights, layer.context
    names, first, state = weights.filtered, weights.filter, context.state
    query = layer.streams.parts()["q"] if state is not None else None
    if query is None or context.padding is not None or query.shape[1] > 1:
        return None
    learns = torch.is_grad_enabled() and any(p.requires_grad for p in weights.parameters())
    held = {n: state.newest_inputs(n, first.window) for n in layer.streams.stored(names)}
    if learns or None in held.values():
        return None
    if not can_step(first.kind.name, query, first.window, context.conv_backend):
        return None
    streams = layer.streams.contiguous()
    inputs, biases, following = list(streams.parts().values()), streams.biases(), {}
    for name, past in held.items():
        rows = min(past.shape[1] + 1, first.window - 1)
        following[name] = past.new_empty(past.shape[0], rows, *past.shape[2:])
    held = {name: past.contiguous() for name, past in held.items()}
    past, after = streams.split_stored(held, names), streams.split_stored(following, names)
    made = convolve_step(
        first.kind.name,
        inputs,
        [past.get(s) for s in STREAMS],
        [weights.taps(s) if s in names else None for s in STREAMS],
        [biases[s] for s in STREAMS],
        [after.get(s) for s in STREAMS],
        window=first.window,
        rotary=context.rotary,
        silu=any(silu in weights.operations[s] for s in names),
    )
    for name, newest in following.items():
        state.replace_inputs(name, newest)
    layer.stored_before = {}  # The state already contains these inputs.
    return dict(zip(STREAMS, made, strict=True)), weights.step_lengths


def _packs_filters(weights: StreamPipeline) -> bool:
    if not (weights.is_packed and weights.filtered and isinstance(weights.filter, Convolution)):
        return False
    return weights.filter.kind.name in (kinds.HEAD.name, kinds.MULTIHEAD.name)


def _packed_filters(layer: LayerPass) -> Made:
    weights, context = layer.weights, layer.context
    further = [op for operations in weights.operations.values() for op in operations[1:]]
    turns = all(isinstance(op, Rotation) for op in further)
    made = convolve_qkv(
        weights.filter.kind.name,
        layer.streams.packed,
        [weights.taps(s, context.group) if s in weights.filtered else None for s in STREAMS],
        layer.streams.bias,
        rotary=context.rotary if turns else None,
        document_ids=context.documents,
        positions=context.document_positions,
        initial_state=layer.exchange().get("qkv"),
        backend=context.conv_backend,
    )
    done = {s: len(weights.operations[s]) if turns else 1 for s in STREAMS}
    return dict(zip(STREAMS, made, strict=True)), done


def _packs_long_filters(weights: StreamPipeline) -> bool:
    return weights.is_packed and isinstance(weights.filter, LongFilter)


def _packed_long_filters(layer: LayerPass) -> Made:
    names, first, group = layer.weights.filtered, layer.weights.filter, layer.context.group
    packed, bias, chosen = layer.streams.packed, layer.streams.bias, STREAM_SLICES[names]
    # [B, T, H, S, D] is [B, T, H·S, D] with H·S filters.
    numbers = torch.stack([layer.weights.taps(s, group) for s in names], dim=1).flatten(0, 1)
    bias = None if bias is None else bias[:, chosen].flatten(0, 1)
    outputs = first.by(numbers, packed[:, :, :, chosen].flatten(2, 3), bias, "qkv", layer.context)
    made = outputs.unflatten(2, (-1, len(names))).unbind(3)
    return dict(zip(names, made, strict=True)), dict.fromkeys(names, 1)


class Fusion(NamedTuple):
    """A kernel that computes the first operations of a layer's streams at once.

    Attributes:
        what: description of the kernel.
        serves: whether it computes what a layer's streams begin with.
        run: computes them, or returns None where these tokens are not what it is for.
    """

    what: str
    serves: Callable[[StreamPipeline], bool]
    run: Callable[[LayerPass], Made | None]


# The first one that serves computes what it covers, and each stream's further operations follow one
# by one. Where none does, a convolution still rotates what it makes if the rotation follows it.
FUSIONS = (
    Fusion("filters, biases, SiLU and rotation of a token", _is_one_kernel, _one_token),
    Fusion(
        "packed filters and biases, and a rotation that follows",
        _packs_filters,
        _packed_filters,
    ),
    Fusion(
        "packed filters as long as the text, and biases", _packs_long_filters, _packed_long_filters
    ),
)


def fuses_rotation(operations: tuple[StreamOp, ...]) -> bool:
    """Return True if the first operations are a convolution and a rotation."""
    return [type(op) for op in operations[:2]] == [Convolution, Rotation]


def fused(weights: StreamPipeline) -> str | None:
    """Return the name of the streams that are computed together for a row, or None."""
    found = next((fusion.what for fusion in FUSIONS[1:] if fusion.serves(weights)), None)
    turns = any(map(fuses_rotation, weights.operations.values()))
    return found or ("a convolution and its rotation, on some devices" if turns else None)
