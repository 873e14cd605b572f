"""Causal convolutions along time, for queries, keys and values."""
