"""Causal convolutions along time, for queries, keys and values."""

from cat_lm.ops.dispatch import (
    BACKENDS,
    BackendChoice,
    choose_backend,
    depthwise_conv,
    head_conv,
    multihead_conv,
)
from cat_lm.ops.qkv import head_conv_qkv, rotate

__all__ = [
    "BACKENDS",
    "BackendChoice",
    "choose_backend",
    "depthwise_conv",
    "head_conv",
    "head_conv_qkv",
    "multihead_conv",
    "rotate",
]
