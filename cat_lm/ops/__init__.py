"""Operators along time, a folder each: convolution (its names stand here too) and recurrence.

Landmark attention, long filters and the loss have folders, too; `runtime` is what they share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cat_lm.ops import convolution

if TYPE_CHECKING:
    from cat_lm.ops.convolution import (
        BACKENDS,
        BackendChoice,
        choose_backend,
        convolve,
        depthwise_conv,
        head_conv,
        head_conv_qkv,
        multihead_conv,
        rotate,
    )

__all__ = [
    "BACKENDS",
    "BackendChoice",
    "choose_backend",
    "convolve",
    "depthwise_conv",
    "head_conv",
    "head_conv_qkv",
    "multihead_conv",
    "rotate",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(convolution, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
