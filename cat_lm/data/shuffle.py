"""The shuffled order of the windows, computed from the position and never stored.

A position counts all windows that a run has count_draws. Every position costs the same to compute,
so that a run can resume at any step, and the step is the only state of the order.
"""

from __future__ import annotations

import hashlib

import numpy as np

FEISTEL_ROUNDS = 8


class Permutation:
    """A pseudo-random permutation of 0 … size − 1, computed point by point in O(1) memory.

    It is a balanced Feistel network over the smallest 4^k ≥ size. Values outside of the range are
    encrypted again until they fall inside (cycle walking), which keeps the mapping one-to-one.
    """

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half = np.uint64(half_bits)
        self._mask = np.uint64((1 << half_bits) - 1)
        digest = hashlib.blake2b(key.encode(), digest_size=8 * FEISTEL_ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8")

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the permuted values of positions (integers in [0, size)); int64, same shape."""
        values = self._encrypt(np.asarray(positions, dtype=np.uint64))
        while (outside := values >= self.size).any():
            values[outside] = self._encrypt(values[outside])
        return values.astype(np.int64)

    def _encrypt(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._half) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """Apply the finaliser of SplitMix64, with which every output bit depends on every input bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class EpochOrder:
    """An order that visits each of `size` windows once per epoch, every epoch in a new order."""

    def __init__(self, size: int, fingerprint: str, seed: int) -> None:
        self.size = size
        self._key = f"{fingerprint} {seed}"

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the window numbers at these positions (counted over all epochs), int64."""
        epochs, within = np.divmod(positions, self.size)
        numbers = np.empty(len(positions), dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            numbers[here] = Permutation(self.size, f"{self._key} {epoch}")(within[here])
        return numbers


class MixtureOrder:
    """An order over several sources with exact proportions in every block of positions.

    A block has sum(`counts`) positions. Source i has exactly `counts[i]` of them, which a keyed
    permutation of the block chooses; the n-th draw of a source is the n-th position of its own
    `EpochOrder`. Windows are numbered consecutively from source to source.
    """

    def __init__(self, orders: list[EpochOrder], counts: list[int], key: str) -> None:
        self._orders, self._key = orders, key
        self._counts = np.array(counts, dtype=np.int64)
        self._ends = np.cumsum(self._counts)
        self._first = np.cumsum([0] + [order.size for order in orders[:-1]])

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the window numbers at these positions, int64, same shape."""
        blocks, within = np.divmod(positions, self._ends[-1])
        numbers = np.empty(len(positions), dtype=np.int64)
        for block in np.unique(blocks):
            here = blocks == block
            sources, draws = self._draws(int(block))
            numbers[here] = self._numbers(sources[within[here]], draws[within[here]])
        return numbers

    def count_draws(self, positions: int) -> list[int]:
        """Return the number of the first `positions` positions that belong to each source."""
        block, within = divmod(positions, int(self._ends[-1]))
        sources, _ = self._draws(block)
        partial = np.bincount(sources[:within], minlength=len(self._counts))
        return (block * self._counts + partial).tolist()

    def _numbers(self, sources: np.ndarray, draws: np.ndarray) -> np.ndarray:
        numbers = np.empty(len(sources), dtype=np.int64)
        for source in np.unique(sources):
            here = sources == source
            numbers[here] = self._first[source] + self._orders[source](draws[here])
        return numbers

    def _draws(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each position of a block, and the number of the source's draw."""
        size = int(self._ends[-1])
        places = Permutation(size, f"{self._key} block {block}")(np.arange(size))
        sources = np.searchsorted(self._ends, places, side="right")
        draws = np.empty(size, dtype=np.int64)
        for source, count in enumerate(self._counts):
            draws[sources == source] = block * count + np.arange(count)
        return sources, draws
