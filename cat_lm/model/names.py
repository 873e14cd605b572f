"""Parameter names of earlier versions and of Pythia's files, as those of today's models."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

Value = TypeVar("Value")

_HEAD = {r"^embed_out\.": "lm_head."}
# Before the convolution was a module of its own, the projection held the filters and their bias.
# The biases of separate projections, too, are added after the convolution.
_CONVOLUTION = {
    r"\.([qkv])_proj\.bias$": r".convolution.\1_bias",
    r"\.query_key_value\.([qkv]_filter)$": r".convolution.\1",
    r"\.query_key_value\.bias$": ".convolution.bias",
}


def renamings(has_convolution: bool) -> dict[str, str]:
    """Give the patterns of earlier names and what takes their place.

    Args:
        has_convolution: whether the model that reads the file has filters; without them the
            projection keeps its bias.
    """
    return _HEAD | (_CONVOLUTION if has_convolution else {})


def has_convolution(names: Iterable[str]) -> bool:
    """Tell by its parameters' names, as they are today, whether a model has filters."""
    return any(".convolution." in name for name in names)


def current_name(name: str, has_convolution: bool) -> str:
    """Translate one parameter's name."""
    for pattern, replacement in renamings(has_convolution).items():
        name = re.sub(pattern, replacement, name)
    return name


def stored_names(names: Iterable[str], has_convolution: bool) -> dict[str, str]:
    """Map today's names to those that a file has."""
    return {current_name(name, has_convolution): name for name in names}
