"""Pathfinder: does a dashed curve join the two marked points (Linsley et al., 2018; LRA, 2020)?

Images are those of the Long Range Arena's files. A tenth is the test split and a tenth validation,
by a hash of the pixels: LRA and S4 draw the same shares by generators of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from cat_lm.core.readers import clipped, read_bytes, read_text
from eval.long_range.tasks.base import Examples, Place, Task
from eval.long_range.tasks.images import PIXELS, picture, pixel_reader
from eval.long_range.tasks.official import LRA, Layout, base_folder
from eval.long_range.tasks.rows import Pixels, held_out, save_pixels
from eval.long_range.tasks.store import Work, stored

_SIZES = (32, 128)
# Contour lengths and LRA's names of their folders.
_FOLDERS = {6: "curv_baseline", 9: "curv_contour_length_9", 14: "curv_contour_length_14"}


@dataclass(frozen=True)
class Pathfinder(Task):
    """Two classes: apart, joined.

    Attributes:
        size: 32 or 128 pixels a side.
        contour: dashes of each target: 14, LRA's hard one, 9 or 6.
        pixels: real, from −1 to 1; or ids from 0 to 255.
    """

    name: ClassVar[str] = "pathfinder"
    official: ClassVar[dict[str, int]] = {"train": 160_000, "validation": 20_000, "test": 20_000}
    size: int = 32
    contour: int = 14
    pixels: str = "real"

    def __post_init__(self) -> None:
        if self.size not in _SIZES:
            raise ValueError(f"size={self.size}: must be 32 or 128")
        if self.contour not in _FOLDERS:
            raise ValueError(f"contour={self.contour}: must be 14, 9 or 6")
        if self.pixels not in PIXELS:
            raise ValueError(f"pixels={self.pixels}: choose {' or '.join(PIXELS)}")

    @property
    def length(self) -> int:
        return self.size**2

    @property
    def vocabulary(self) -> int:
        return 256 if self.pixels == "ids" else 0

    @property
    def channels(self) -> int:
        return 0 if self.pixels == "ids" else 1

    @property
    def classes(self) -> int:
        return 2

    @property
    def needs_folder(self) -> bool:
        return True

    @property
    def notes(self) -> tuple[str, ...]:
        return ("Validation and test are a tenth of the official images each, by a hash.",)

    def load(self, split: str, place: Place | None = None) -> Examples:
        place = place or Place()
        files = ImageFolder(place.folder, self.size, self.contour)
        kept = stored(place, self.name, {"version": self.version, **files.key()}, files.save)
        return Pixels(kept, split, pixel_reader(self.pixels, 127.5, 127.5))

    def shown(self, inputs: np.ndarray, origin: Mapping[str, Any]) -> str:
        return picture(inputs.reshape(-1), *((0, 255) if self.pixels == "ids" else (-1, 1)))


class ImageFolder:
    """LRA's folder of one size and contour length: metadata/N.npy, a text, and imgs/N/*.png."""

    def __init__(self, folder: Path | None, size: int, contour: int) -> None:
        """Find the folder. Raises UserError where it or its lists are missing."""
        name = f"pathfinder{size}"
        layout = Layout(
            "pathfinder",
            (f"{name}/{_FOLDERS[contour]}", f"lra_release/{name}/{_FOLDERS[contour]}"),
            LRA,
        )
        base = base_folder(folder, layout, "metadata")
        self._base, self._layout, self._size = base, layout, size
        lists = [p for p in (base / "metadata").iterdir() if p.suffix == ".npy"]
        self._lists = sorted((p for p in lists if p.stem.isdigit()), key=lambda p: int(p.stem))
        if not self._lists:
            layout.refuse(base / "metadata", "has no list (NUMBER.npy)")

    def key(self) -> dict[str, Any]:
        """Return what tells these files from changed ones: their lists, without the images."""
        stamps = {p.name: [p.stat().st_size, p.stat().st_mtime_ns] for p in self._lists}
        return {"folder": str(self._base.resolve()), "lists": stamps}

    def save(self, work: Work) -> dict[str, Any]:
        """Keep all images in their splits. Raises UserError for a list or image that is wrong."""
        images, labels, empty = [], [], 0
        for path, label in self._images():
            if path.is_file() and path.stat().st_size == 0:  # the release has one
                empty += 1
                continue
            images.append(self._read(path))
            labels.append(label)
        if not images:
            self._layout.refuse(self._base, "its lists name no image that has bytes")
        pixels, classes = np.stack(images), np.array(labels)
        contents = [row.tobytes() for row in pixels]
        test = held_out(contents, 0.1)
        validation = held_out(contents, 0.2) & ~test
        chosen = {"train": ~test & ~validation, "validation": validation, "test": test}
        for split, rows in chosen.items():
            save_pixels(work, split, pixels[rows], classes[rows])
        digest = hashlib.sha256(b"".join(map(read_bytes, self._lists)))
        digest.update(pixels)
        found = {"folder": self._base.name, "images": len(images), "empty_files": empty}
        return {**found, "sha256": digest.hexdigest()}

    def _images(self) -> Iterator[tuple[Path, int]]:
        for path in self._lists:
            for number, line in enumerate(read_text(path).splitlines(), 1):
                columns = line.split()
                if len(columns) < 4 or columns[3] not in ("0", "1"):
                    where = f"{path}, line {number}"
                    self._layout.refuse(
                        where, f"{clipped(line)!r} is no folder, file, number and class"
                    )
                yield self._base / columns[0] / columns[1], int(columns[3])

    def _read(self, path: Path) -> np.ndarray:
        from PIL import Image, UnidentifiedImageError

        try:
            # Of Pillow's other formats some start programs, as PostScript does.
            with Image.open(path, formats=["PNG"]) as picture:
                image = np.asarray(picture.convert("L"))
        except FileNotFoundError:
            self._layout.refuse(path, "no such file")
        except (UnidentifiedImageError, OSError, SyntaxError):
            self._layout.refuse(path, "is truncated or no PNG image")
        if image.shape != (self._size, self._size):
            height, width = image.shape
            self._layout.refuse(path, f"is {height}×{width}, must be {self._size}×{self._size}")
        return image.ravel()
