"""Naive double-precision references, one a mechanism, written from the papers' equations."""
