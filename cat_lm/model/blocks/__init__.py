"""Blocks: the norms, residuals and MLP around a mixer in a layer."""
