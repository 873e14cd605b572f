"""Blocks: what stands around a mixer in a layer."""
