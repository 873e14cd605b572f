"""Compares CAT with its rivals at equal parameters, tokens and care: `python -m eval.rivals`."""
