"""Best-fit decreasing: which window each document, or piece of one, is packed into."""

from __future__ import annotations

import numpy as np

# A piece of a document: its first token's index in the stream, and `length << 2 | flags`.
PIECE = np.dtype([("start", "<i8"), ("packed", "<i4")])
# Flags of a piece: it begins its document; its document continues in another window.
FIRST, CUT = 1, 2


def pack(starts: np.ndarray, lengths: np.ndarray, context_length: int) -> tuple[np.ndarray, ...]:
    """Pack documents into windows of `context_length` tokens.

    Args:
        starts, lengths: first token and number of tokens of each document, both [N].

    Returns:
        The pieces [P] in the order of their windows, and the number of pieces in each window.
    """
    full = lengths // context_length
    rest = lengths - full * context_length
    # Cut long documents into full windows.
    owner = np.repeat(np.arange(len(lengths)), full)
    part = np.arange(len(owner)) - np.repeat(np.cumsum(full) - full, full)
    cut = (part + 1) * context_length < lengths[owner]
    whole = _pieces(
        starts[owner] + part * context_length,
        np.full(len(owner), context_length),
        np.where(part == 0, FIRST, 0) | np.where(cut, CUT, 0),
    )
    # Pack the rests of these, and documents that are shorter than a window.
    some = np.flatnonzero(rest)
    windows = best_fit(rest[some], context_length)
    order = np.argsort(windows, kind="stable")
    some = some[order]
    packed = _pieces(
        starts[some] + full[some] * context_length,
        rest[some],
        np.where(full[some] == 0, FIRST, 0),
    )
    counts = np.concatenate([np.ones(len(whole), np.int64), np.bincount(windows)])
    return np.concatenate([whole, packed]), counts


def _pieces(starts: np.ndarray, lengths: np.ndarray, flags: np.ndarray) -> np.ndarray:
    pieces = np.empty(len(starts), dtype=PIECE)
    pieces["start"], pieces["packed"] = starts, lengths << 2 | flags
    return pieces


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return the window of each item by best-fit decreasing, numbered from 0; int64 [N].

    The longest item comes first. Each goes into the window with the least space that holds it.
    """
    windows = np.zeros(len(lengths), dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # Bit r is set if some window has r free tokens.
    opened = 0
    placed = []
    for length in lengths[order].tolist():
        if fitting := rooms >> length:
            room = length + (fitting & -fitting).bit_length() - 1
            window = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            window, room = opened, capacity
            opened += 1
        placed.append(window)
        room -= length
        if room:
            by_room[room].append(window)
            rooms |= 1 << room
    windows[order] = placed
    return windows
