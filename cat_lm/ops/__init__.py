"""Causal convolutions along time."""

from cat_lm.ops.head import BACKENDS, choose_backend, head_conv

__all__ = ["BACKENDS", "choose_backend", "head_conv"]
