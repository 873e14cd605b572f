"""Causal convolutions along time."""

from cat_lm.ops.dispatch import BACKENDS, choose_backend, head_conv, multihead_conv

__all__ = ["BACKENDS", "choose_backend", "head_conv", "multihead_conv"]
