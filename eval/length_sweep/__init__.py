"""Measure perplexity against context length (`python -m eval.length_sweep`)."""
