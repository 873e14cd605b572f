"""Queries, keys and values between their projections and attention, and convolutions elsewhere.

`pipeline` makes a layer's `operations` of a configuration, and lists the kernels that compute
several of them at once.
"""
