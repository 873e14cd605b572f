"""Attention to the blocks of keys that landmarks find: its parts, each by itself.

`layout` says which tokens make which block, `keys` makes a block's landmark, `select` chooses
blocks by it, and the backends of `attend` attend to them.
"""
