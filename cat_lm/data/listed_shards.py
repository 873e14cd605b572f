"""Shards known by their manifest's entries, opened where they are first used."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np

from cat_lm.data.manifest import open_shard
from cat_lm.data.shards import Shard


class ListedShard:
    """What a corpus and the packing use of a `Shard`, which another process has looked at.

    Ranks of many nodes that each look at thousands of files keep a file system's servers busy.
    """

    def __init__(self, folder: Path, entry: dict, dtype: str) -> None:
        self._folder, self._entry = folder, entry
        self.name: str = entry["name"]
        self.num_tokens: int = entry["tokens"]
        self.num_documents: int = entry["documents"]
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.bin_path = folder / f"{self.name}.bin"

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) in the dtype on disk."""
        return self._whole().read(start, stop)

    def document(self, index: int) -> tuple[int, int]:
        return self._whole().document(index)

    @property
    def lengths(self) -> np.ndarray:
        return self._whole().lengths

    @property
    def pointers(self) -> np.ndarray:
        return self._whole().pointers

    @property
    def document_marks(self) -> np.ndarray:
        return self._whole().document_marks

    def forget_index(self) -> None:
        self._whole().forget_index()

    def _whole(self) -> Shard:
        """The shard itself. Raises UserError where it is not what the manifest says."""
        return self._opened

    @cached_property
    def _opened(self) -> Shard:
        return open_shard(self._folder, self._entry, self.dtype.name)
