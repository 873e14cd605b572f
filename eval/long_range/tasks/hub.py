"""Data sets on the Hugging Face Hub, each at one commit."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cat_lm.core.errors import UserError, reason_of

T = TypeVar("T")


class Pinned(NamedTuple):
    """A data set of the Hub at a commit.

    Attributes:
        local: what to give --data instead, for the line where the Hub cannot be reached.
    """

    name: str
    revision: str
    local: str

    def key(self) -> dict[str, Any]:
        """Name it in keys and origins."""
        return {"hub": self.name, "revision": self.revision}

    def rows(self, split: str) -> Any:
        """Return a split as a `datasets.Dataset`. Raises UserError where it cannot be had."""
        import datasets

        return self._ask(
            lambda: datasets.load_dataset(self.name, split=split, revision=self.revision)
        )

    def images(self, split: str, column: str, mode: str) -> tuple[Iterator[np.ndarray], list[int]]:
        """Yield a split's images, [height, width(, 3)] uint8 in Pillow's `mode`, and labels."""
        import datasets
        from PIL import Image

        rows = self.rows(split).cast_column(column, datasets.Image(decode=False))
        # Of Pillow's other formats some start programs, as PostScript does.
        pictures = (
            np.asarray(Image.open(io.BytesIO(row[column]["bytes"]), formats=["PNG"]).convert(mode))
            for row in rows
        )
        return pictures, list(rows["label"])

    def file(self, path: str) -> Path:
        """Return one of its files, downloaded once. Raises UserError where it cannot be had."""
        from huggingface_hub import hf_hub_download

        return Path(
            self._ask(
                lambda: hf_hub_download(
                    self.name, path, revision=self.revision, repo_type="dataset"
                )
            )
        )

    def _ask(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except Exception as error:  # the libraries raise many kinds, network errors among them
            raise UserError(
                f"{self.name} at {self.revision[:8]} cannot be had from the Hub "
                f"({reason_of(error)}); with files on this machine give --data DIR ({self.local})"
            ) from error
