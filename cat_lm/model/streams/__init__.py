"""Queries, keys and values between their projections and attention, and convolutions elsewhere.

`pipeline` builds a layer's operations, each in a file of its own; `fusions` lists the kernels that
compute several of them at once.
"""
