"""MNIST's files: idx, big-endian, a magic number, sizes, then bytes (LeCun, Cortes, Burges)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from eval.long_range.tasks.official import Layout, read_whole

_BYTES = 8  # idx's code for unsigned bytes


def read_idx(path: Path, dimensions: int, layout: Layout) -> np.ndarray:
    """Read an idx file of unsigned bytes, packed or not.

    Args:
        dimensions: that it must have.

    Raises:
        UserError: it is none, has other dimensions, is truncated or too long.
    """
    data = read_whole(path, layout)
    header = 4 + 4 * dimensions
    magic = int.from_bytes(data[:4], "big")
    expected = _BYTES * 256 + dimensions
    if len(data) < 4:
        layout.refuse(path, f"is truncated: {len(data)} bytes, its header has {header}")
    if magic != expected:
        layout.refuse(path, f"begins with {magic:#010x}, must be idx of {expected:#010x}")
    if len(data) < header:
        layout.refuse(path, f"is truncated: {len(data):,} bytes, its header has {header}")
    shape = [int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions)]
    size = header + int(np.prod(shape, dtype=object))
    if len(data) != size:
        how = "truncated" if len(data) < size else "too long"
        layout.refuse(path, f"is {how}: {len(data):,} bytes, its header says {size:,}")
    return np.frombuffer(data, dtype=np.uint8, offset=header).reshape(shape)
