"""Kernels that compute several operations of a layer's streams at once: the table of them.

The first one that serves computes what it covers, and each stream's further operations follow one
by one. Where none does, a convolution still rotates what it makes if the rotation follows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cat_lm.model.streams.base import PackedStreams, StreamOp
from cat_lm.model.streams.convolution import Bias, Convolution
from cat_lm.model.streams.layer_pass import LayerPass, fuses_rotation
from cat_lm.model.streams.long_filter import LongFilter
from cat_lm.model.streams.rotation import Activation, Rotation, Silu
from cat_lm.model.streams.weights import StreamWeights
from cat_lm.ops import head_conv_qkv
from cat_lm.ops.convolution import kinds
from cat_lm.ops.convolution.kinds import STREAMS
from cat_lm.ops.convolution.qkv import STREAM_SLICES
from cat_lm.ops.convolution.step import can_step, convolve_step

# Streams by their letters, and how many operations of each are done.
Made = tuple[dict[str, Tensor], dict[str, int]]


@dataclass(frozen=True)
class Fusion:
    """A kernel that computes the first operations of the streams.

    Attributes:
        what: in words.
        is_packed: whether it needs streams of one projection.
        serves: whether it computes what a layer's streams begin with.
        run: computes them, or gives None where these tokens are not what it is for.
    """

    what: str
    is_packed: bool
    serves: Callable[[StreamWeights], bool]
    run: Callable[[LayerPass], Made | None]

    def __call__(self, layer: LayerPass) -> Made | None:
        """Compute the operations, or give None where the kernel does not serve."""
        fits = isinstance(layer.streams, PackedStreams) or not self.is_packed
        return self.run(layer) if fits and self.serves(layer.weights) else None


def _is_one_kernel(weights: StreamWeights) -> bool:
    done = [_computed_with_filters(operations) for operations in weights.operations.values()]
    has_taps = isinstance(weights.filter, Convolution) and bool(weights.filtered)
    return has_taps and None not in done and len(set(weights.widths.values())) == 1


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
    inputs, biases = list(streams.parts().values()), streams.biases()
    following = {}
    for name, past in held.items():
        rows = min(past.shape[1] + 1, first.window - 1)
        following[name] = past.new_empty(past.shape[0], rows, *past.shape[2:])
    held = {name: past.contiguous() for name, past in held.items()}
    past, after = streams.apart(held, names), streams.apart(following, names)
    made = convolve_step(
        first.kind.name,
        inputs,
        [past.get(s) for s in STREAMS],
        [weights.taps(s) if s in names else None for s in STREAMS],
        [biases[s] for s in STREAMS],
        [after.get(s) for s in STREAMS],
        window=first.window,
        rotary=context.rotary,
        silu=any(type(op) is Silu for s in names for op in weights.operations[s]),
    )
    for name, newest in following.items():
        state.replace_inputs(name, newest)
    done = {s: _computed_with_filters(weights.operations[s]) for s in STREAMS}
    return dict(zip(STREAMS, made, strict=True)), done


def _computed_with_filters(operations: tuple[StreamOp, ...]) -> int | None:
    """Count the operations that the kernel of one token computes; None if it cannot come first."""
    rest = [op for op in operations if not isinstance(op, Activation)]
    able = all(isinstance(op, Convolution | Bias | Silu | Rotation) for op in rest)
    return len(rest) if able else None


def _has_filters_of_heads(weights: StreamWeights) -> bool:
    first = weights.filter
    return isinstance(first, Convolution) and first.kind is kinds.HEAD and bool(weights.filtered)


def _packed_filters_of_heads(layer: LayerPass) -> Made:
    weights, context = layer.weights, layer.context
    further = [op for operations in weights.operations.values() for op in operations[1:]]
    turns = all(isinstance(op, Rotation) for op in further)
    made = head_conv_qkv(
        layer.streams.packed,
        [weights.taps(s, context.group) for s in STREAMS],
        layer.streams.bias,
        rotary=context.rotary if turns else None,
        document_ids=context.documents,
        positions=context.document_positions,
        initial_state=layer.before.get("qkv"),
        backend=context.conv_backend,
    )
    done = {s: len(weights.operations[s]) if turns else 1 for s in STREAMS}
    return dict(zip(STREAMS, made, strict=True)), done


def _has_long_filters(weights: StreamWeights) -> bool:
    return isinstance(weights.filter, LongFilter)


def _packed_long_filters(layer: LayerPass) -> Made:
    names, first, group = layer.weights.filtered, layer.weights.filter, layer.context.group
    packed, bias, chosen = layer.streams.packed, layer.streams.bias, STREAM_SLICES[names]
    # [B, T, H, S, D] is [B, T, H·S, D] with H·S filters.
    numbers = torch.stack([layer.weights.taps(s, group) for s in names], dim=1).flatten(0, 1)
    bias = None if bias is None else bias[:, chosen].flatten(0, 1)
    outputs = first.by(numbers, packed[:, :, :, chosen].flatten(2, 3), bias, "qkv", layer.context)
    made = outputs.unflatten(2, (-1, len(names))).unbind(3)
    return dict(zip(names, made, strict=True)), dict.fromkeys(names, 1)


FUSIONS = (
    Fusion("filters, biases, SiLU and rotation of a token", False, _is_one_kernel, _one_token),
    Fusion(
        "packed filters of heads and biases, on a GPU with a rotation that follows",
        True,
        _has_filters_of_heads,
        _packed_filters_of_heads,
    ),
    Fusion(
        "packed filters as long as the text, and biases",
        True,
        _has_long_filters,
        _packed_long_filters,
    ),
)


def fused(weights: StreamWeights) -> str | None:
    """Name what is computed together of a row's streams; None where nothing is."""
    rows = (f for f in FUSIONS[1:] if weights.is_packed or not f.is_packed)
    found = next((fusion.what for fusion in rows if fusion.serves(weights)), None)
    turns = any(fuses_rotation(operations) for operations in weights.operations.values())
    return found or ("on a GPU a convolution and the rotation that follows" if turns else None)
