"""What computes the convolutions of a model, and why, in words."""

from __future__ import annotations

import torch

from cat_lm.model import attention
from cat_lm.model.attention.settings import AttentionSettings
from cat_lm.model.rules import canon_places
from cat_lm.model.streams.pipeline import StreamPipeline, fused
from cat_lm.ops import BACKENDS, choose_backend
from cat_lm.ops.long_filter import LENGTH
from cat_lm.ops.long_filter import api as long_filter


def describe_backend(
    config: AttentionSettings,
    device: torch.device | str,
    dtype: torch.dtype,
    backend: str = "auto",
    is_packed: bool = False,
) -> str:
    """Return what will compute the convolutions of a model, and why, in one line.

    Args:
        config: the model's.
        device, dtype: where and in what the projections are computed.
        backend: what `set_conv_backend` of the model was given.
        is_packed: whether one projection makes all three streams.

    Raises:
        ValueError: the backend asked for cannot serve.
    """
    # Each of a kind: what, W, heads and channels of a head.
    parts: list[tuple[str, str, int, int, int]] = []

    def add(conv_type: str, streams: str, purpose: str = "") -> None:
        if streams:
            what = f"{conv_type} convolution of {', '.join(streams)}{purpose}"
            heads = config.stream_heads(streams[0])
            parts.append((conv_type, what, config.conv_window, heads, config.head_width))

    if not config.has_long_filters:
        add(config.conv_type, config.embedding_streams)
    if config.mixes_maps:  # values whose attention maps are mixed are convolved head by head
        add("head", "v", " for the mixing of attention maps")
    value = attention.value_transform(config)
    if value is not None and (taps := value.taps(config)):
        parts.append(("head", value.title, taps, config.stream_heads("v"), config.head_width))
    if places := canon_places(config):
        what = f"Canon layers {', '.join(places)}"
        parts.append(("depthwise", what, config.canon_window, 1, config.hidden_size))
    lines = [_long_filters(config, device, dtype, backend)] if config.has_long_filters else []
    found = _fused(config, is_packed)
    for conv_type, what, window, heads, head_dim in parts:
        choice = choose_backend(
            conv_type,
            device=device,
            dtype=dtype,
            window=window,
            heads=heads,
            head_dim=head_dim,
            backend=backend,
        )
        runs = BACKENDS.get(choice.name).describe(conv_type, dtype, window)
        lines.append(f"{what} (W={window}): {choice.name}, {choice.reason}; {runs}")
    return "; ".join([*lines, *found]) or "no convolutions"


def _fused(config: AttentionSettings, is_packed: bool) -> list[str]:
    """Name the operations of a row's streams that one kernel computes."""
    if not config.convolved_streams:
        return []
    with torch.device("meta"):
        found = fused(StreamPipeline(config, {"bias": None} if is_packed else {}))
    return [f"fused: {found or 'nothing'}"]


def _long_filters(
    config: AttentionSettings, device: torch.device | str, dtype: torch.dtype, backend: str
) -> str:
    size = config.conv_state
    choice = long_filter.choose_backend(device, dtype, size, backend)
    what = f"{config.conv_filter} filters of {', '.join(config.embedding_streams)} (N={size})"
    runs = f"chunks of {LENGTH} tokens, sums and states in fp32"
    return f"{what}: {choice.name}, {choice.reason}; {runs}"
