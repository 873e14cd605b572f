"""Read the learned convolution filters of an exported model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import safe_open

from cat_lm.ops.convolution import kinds
from cat_lm.ops.long_filter import filters as long_filters
from cat_lm.pretrained.loading import model_config, weight_files
from cat_lm.pretrained.record import verify

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig

_LAGS = 64  # The lags that are shown of filters as long as the text.
_FILTER_NAME = re.compile(r"\blayers\.(\d+)\..*\b([qkv])_filter$")


@dataclass(frozen=True)
class Filters:
    """The filters of a model.

    Attributes:
        conv_type: their kind's name.
        streams: q, k, v -> float32 [layers, *shape], the shape being the kind's; of filters as long
            as the text the first 64 taps.
        left_out: the filters that the model has in addition, in a sentence; "" for none.
    """

    conv_type: str
    streams: dict[str, np.ndarray]
    left_out: str = ""

    @property
    def kind(self) -> kinds.Kind:
        return kinds.get(self.conv_type)


def read_filters(model: Path) -> Filters | None:
    """Read the filters in the export at `model`; None without an export or convolutions.

    Raises:
        UserError: its files are damaged, or are no longer what was exported.
    """
    if not (model / "config.json").is_file() or not weight_files(model):
        return None
    config = model_config(model)
    if not getattr(config, "convolved_streams", ""):
        return None
    files = weight_files(model)
    verify(model, {file.name for file in files}.__contains__)
    tensors: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as stored:
            names = filter(_FILTER_NAME.search, stored.keys())
            tensors |= {name: stored.get_tensor(name) for name in names}
    if config.has_long_filters:
        tensors = {name: _first_taps(config, numbers) for name, numbers in tensors.items()}
    # Filters are shown in their normalised form.
    elif getattr(config, "conv_norm", "none") == "l1":
        kind = kinds.get(config.conv_type)
        tensors = {name: kind.normalized(taps.float()) for name, taps in tensors.items()}
    layers: dict[str, dict[int, np.ndarray]] = {}
    for name in tensors:
        match = _FILTER_NAME.search(name)
        layers.setdefault(match[2], {})[int(match[1])] = tensors[name].float().numpy()
    streams = {
        stream: np.stack([layers[stream][layer] for layer in sorted(layers[stream])])
        for stream in config.convolved_streams
    }
    # A picture has one place for the filter of each head and stream.
    others = []
    if (rank := getattr(config, "conv_rank", 1)) > 1:
        others.append(f"{rank - 1} more of q and of k in each head (conv_rank={rank})")
    if (canon := getattr(config, "canon", "none")) != "none":
        others.append(f"those of Canon layers (canon={canon})")
    left_out = f"Not drawn: {' and '.join(others)}." if others else ""
    return Filters(config.conv_type, streams, left_out)


def _first_taps(config: PreTrainedConfig, numbers: Tensor) -> Tensor:
    from cat_lm.ops.long_filter.chunks import taps_of

    modes = long_filters.get(config.conv_filter).modes_of(numbers, config.conv_state)
    return taps_of(modes, min(_LAGS, config.max_position_embeddings))


def own_taps(filters: Filters) -> dict[str, np.ndarray]:
    """Return each stream's taps by lag, [layers, heads, W]; every kind has them."""
    found = {}
    for stream, taps in filters.streams.items():
        taps, axes = _mean_over_channels(taps, filters.kind)
        # Of filters between pairs of heads, take the diagonal: a head's filter of its own input.
        letters = "".join({"H": "h", "I": "h", "W": "w"}[axis] for axis in axes)
        kept = "lhw" if "h" in letters else "lw"
        taps = np.einsum(f"l{letters}->{kept}", taps)
        found[stream] = taps if "h" in letters else taps[:, None]
    return found


def head_norms(filters: Filters) -> dict[str, np.ndarray]:
    """Return the filters' norms over lags, [layers, H, heads read from], if heads are mixed."""
    found = {}
    for stream, taps in filters.streams.items():
        taps, axes = _mean_over_channels(taps, filters.kind)
        norms = np.linalg.norm(taps, axis=1 + axes.index("W"))
        others = [axis for axis in axes if axis != "W"]
        found[stream] = norms if others.index("H") == 0 else norms.swapaxes(1, 2)
    return found


def _mean_over_channels(taps: np.ndarray, kind: kinds.Kind) -> tuple[np.ndarray, list[str]]:
    axes = list(kind.filter_axes)
    if "D" in axes:
        taps = taps.mean(axis=1 + axes.index("D"))
        axes.remove("D")
    return taps, axes
