"""The settings that a loaded model really uses: convolution backends, positions and temperature."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel

from cat_lm.model import attention
from cat_lm.model.attention.core import AttentionMixin
from cat_lm.model.attention.settings import AttentionSettings
from cat_lm.model.hf.causal_lm import CausalLanguageModel
from cat_lm.model.rope_scaling import logit_temperature
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
    """Return one line that names the backend of a model's convolutions, and the reason.

    Args:
        device, dtype: where and in what the projections are computed.
        backend: what `set_conv_backend` of the model was given; ValueError where it cannot serve.
        is_packed: whether one projection makes all three streams.
    """
    parts, window, width = [], config.conv_window, config.head_width
    lines = [_long_filters(config, device, dtype, backend)] if config.has_long_filters else []
    if (streams := config.embedding_streams) and not lines:
        what = f"{config.conv_type} convolution of {', '.join(streams)}"
        parts.append((config.conv_type, what, window, config.stream_heads(streams[0]), width))
    if config.mixes_maps:  # Values with mixed attention maps are convolved head by head.
        what = "head convolution of v for the mixing of attention maps"
        parts.append(("head", what, window, config.stream_heads("v"), width))
    value = attention.value_transform(config)
    if value is not None and (taps := value.taps(config)):
        parts.append(("head", value.title, taps, config.stream_heads("v"), width))
    if places := canon_places(config):
        what = f"Canon layers {', '.join(places)}"
        parts.append(("depthwise", what, config.canon_window, 1, config.hidden_size))
    lines += describe_convolutions(parts, device, dtype, backend)
    if config.convolved_streams:
        with torch.device("meta"):
            found = fused(StreamPipeline(config, {"bias": None} if is_packed else {}))
        lines.append(f"fused: {found or 'nothing'}")
    return "; ".join(lines) or "no convolutions"


def describe_convolutions(
    parts: Iterable[tuple[str, str, int, int, int]],
    device: torch.device | str,
    dtype: torch.dtype,
    backend: str,
) -> list[str]:
    """Return lines that name the backends of convolutions, and the reasons, without repeats.

    Args:
        parts: of each its kind, what it is, W, heads, and channels of a head.

    Raises:
        ValueError: the backend asked for cannot serve.
    """
    lines, how = [], {"device": device, "dtype": dtype, "backend": backend}
    for kind, what, taps, heads, channels in parts:
        choice = choose_backend(kind, window=taps, heads=heads, head_dim=channels, **how)
        runs = BACKENDS.get(choice.name).describe(kind, dtype, taps)
        lines.append(f"{what} (W={taps}): {choice.name}, {choice.reason}; {runs}")
    return list(dict.fromkeys(lines))


def _long_filters(
    config: AttentionSettings, device: torch.device | str, dtype: torch.dtype, backend: str
) -> str:
    size = config.conv_state
    choice = long_filter.choose_backend(device, dtype, size, backend)
    what = f"{config.conv_filter} filters of {', '.join(config.embedding_streams)} (N={size})"
    runs = f"chunks of {LENGTH} tokens, sums and states in fp32"
    return f"{what}: {choice.name}, {choice.reason}; {runs}"


def effective_scaling(model: PreTrainedModel) -> dict[str, Any]:
    """Read the effective position scaling from a loaded model's modules.

    Returns:
        rope_type (None without rotary positions), rope_factor, original_length, attention_factor
        (on cosines and sines, where it is YaRN's or the temperature's), attention_temperature (t of
        the logits, 1 where they are not scaled).

    Raises:
        RuntimeError: layers differ, or the modules do not do what the configuration says.
    """
    rotary = getattr(model.base_model, "rotary_emb", None)
    found = {
        "rope_type": None,
        "rope_factor": None,
        "original_length": None,
        "attention_factor": None,
        "attention_temperature": 1.0,
    }
    if rotary is not None and isinstance(getattr(rotary, "rope_type", None), str):
        rope = rotary.config.rope_parameters or {}
        found["rope_type"] = rope.get("rope_type", "default")
        found["rope_factor"] = rope.get("factor", 1.0)
        found["original_length"] = rope.get("original_max_position_embeddings")
        found["attention_factor"] = rotary.attention_scaling
    if isinstance(model, CausalLanguageModel) and isinstance(model.config, AttentionSettings):
        found["attention_temperature"] = _logit_temperature(model)
    return found


def _logit_temperature(model: PreTrainedModel) -> float:
    width = math.sqrt(model.config.head_width)
    factors = {
        module.scaling * width for module in model.modules() if isinstance(module, AttentionMixin)
    }
    expected = logit_temperature(model.config)
    if any(not math.isclose(factor * expected, 1, rel_tol=1e-9) for factor in factors):
        raise RuntimeError(f"attention scales logits by {factors}, not by 1/{expected}")
    return expected
