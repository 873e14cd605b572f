"""Operators along time, a folder each: convolution (its names stand here too) and recurrence.

Landmark attention, long filters and the loss have folders, too; `runtime` is what they share. The
table of kinds (`cat_lm.ops.convolution.kinds`) needs no torch, so what does is imported when it is
asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cat_lm.ops.convolution.api import (
        convolve,
        depthwise_conv,
        head_conv,
        multihead_conv,
        rotate,
    )
    from cat_lm.ops.convolution.backends import BACKENDS, BackendChoice, choose_backend
    from cat_lm.ops.convolution.qkv import convolve_qkv, head_conv_qkv

__all__ = [
    "BACKENDS",
    "BackendChoice",
    "choose_backend",
    "convolve",
    "convolve_qkv",
    "depthwise_conv",
    "head_conv",
    "head_conv_qkv",
    "multihead_conv",
    "rotate",
]
_HOMES = dict.fromkeys(("convolve_qkv", "head_conv_qkv"), "qkv")
_HOMES |= dict.fromkeys(("BACKENDS", "BackendChoice", "choose_backend"), "backends")


def __getattr__(name: str) -> Any:
    if name in __all__:
        module = importlib.import_module(f"{__name__}.convolution.{_HOMES.get(name, 'api')}")
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
