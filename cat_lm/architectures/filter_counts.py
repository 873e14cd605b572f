"""What the filters of queries, keys and values count for, and what they are in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cat_lm.model import rules
from cat_lm.ops.convolution import kinds
from cat_lm.ops.long_filter import LENGTH, filters

if TYPE_CHECKING:
    from torch import Tensor

    from cat_lm.architectures.base import Architecture

_STATE_BYTES = 4  # of a number of a long filter's state, which is in fp32 always


def parameters(family: Architecture, section: Any) -> int:
    """Count the learned numbers of a layer's filters, those of ranks beyond the first aside."""
    channels, found = family.head_channels(section), 0
    for stream in family.streams(section):
        heads = family.heads_of(section, stream)
        if rules.has_long_filters(section):
            found += heads * filters.get(section.conv_filter).numbers(section.conv_state)
        else:
            kind = kinds.get(section.conv_type)
            found += kind.filter_parameters(heads, channels, section.conv_window)
    return found


def flops(family: Architecture, section: Any) -> int:
    """Count a token's FLOPs of a layer's filters, forward and backward.

    6·W per channel, H times that where heads are mixed; of a long filter 6 times the products of
    its recurrence, however many more the form makes that computes it.
    """
    channels, found = family.head_channels(section), 0
    for stream in family.streams(section):
        heads = family.heads_of(section, stream)
        if rules.has_long_filters(section):
            products = filters.get(section.conv_filter).products(section.conv_state)
        else:
            products = kinds.get(section.conv_type).fan_in(heads, section.conv_window)
        found += 6 * products * heads * channels
    return found


def state_bytes(family: Architecture, section: Any, itemsize: int) -> int:
    """Count what decoding keeps of a layer's filters: the last W−1 inputs, or N numbers."""
    streams = family.streams(section)
    if family.mixes_maps(section):
        streams = streams.replace("v", "")  # whose filters read the cached values
    channels = family.head_channels(section)
    channels *= sum(family.heads_of(section, stream) for stream in streams)
    if rules.has_long_filters(section):
        return channels * section.conv_state * _STATE_BYTES
    return channels * (section.conv_window - 1) * itemsize


def saved_tensors(family: Architecture, section: Any) -> float:
    """Count what autograd keeps for long filters, in tensors of [B, T, C]: states of chunks."""
    if not rules.has_long_filters(section):
        return 0.0
    heads = sum(family.heads_of(section, stream) for stream in family.streams(section))
    part = heads * family.head_channels(section) / section.hidden_size
    return part * section.conv_state / LENGTH


def long_variants() -> dict[str, str]:
    """Name every kind of filters as long as the text, with what it is; N as `long_keys` has it."""
    return {
        kind.name: f"one filter for each head, {kind.meaning}, N={kind.usual_state}"
        for kind in map(filters.get, filters.names())
    }


def long_keys(name: str) -> dict[str, Any]:
    """Return the keys of a kind of filters as long as the text, of its usual N."""
    window = {"conv_window": rules.DEFAULT_WINDOW}  # which says nothing
    state = filters.get(name).usual_state
    return window | {"conv_type": kinds.HEAD.name, "conv_filter": name, "conv_state": state}


def identity(family: Architecture, section: Any, stream: str) -> Tensor:
    """Make a stream's filters that change nothing."""
    heads = family.heads_of(section, stream)
    if rules.has_long_filters(section):
        return filters.get(section.conv_filter).identity(heads, section.conv_state)
    kind = kinds.get(section.conv_type)
    return kind.identity(heads, family.head_channels(section), section.conv_window)


def words(family: Architecture, section: Any) -> str:
    """Name the filters."""
    if not family.streams(section):
        return "no convolution"
    streams = ", ".join(family.streams(section))
    said = f"{section.conv_type} convolution of {streams}, "
    if rules.has_long_filters(section):
        return f"{said}{section.conv_filter} filters of state N={section.conv_state}"
    said += f"W={section.conv_window}"
    said += f", rank {section.conv_rank}" if section.conv_rank > 1 else ""
    said += ", l1-normalised" if section.conv_norm == "l1" else ""
    return said + (", then SiLU" if section.conv_activation == "silu" else "")
