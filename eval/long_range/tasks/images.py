"""Pictures read pixel by pixel: MNIST in rows or permuted, CIFAR-10 in grey, Pathfinder.

MNIST and CIFAR-10 have no validation split: a tenth of the training images, chosen by a hash of
their pixels, is held out. (S4 and LRA hold out a tenth too, but other ones.) Of Pathfinder's images
(Linsley et al., 2018), in which a dashed curve joins two marked points or does not, a tenth is the
test split and a tenth validation in the same way: LRA and S4 draw the same shares by generators of
their own.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from cat_lm.core.errors import UserError
from cat_lm.core.readers import clipped, read_text
from cat_lm.mixers.parts.base import check_choice
from eval.long_range.tasks.base import Examples, Place
from eval.long_range.tasks.sources import LRA, Source
from eval.long_range.tasks.store import HELD_OUT, Made, StoredTask, held_out

_MNIST = Source(
    "smnist",
    ("mnist", "MNIST/raw", ""),
    {
        "train images": "train-images-idx3-ubyte.gz",
        "train labels": "train-labels-idx1-ubyte.gz",
        "test images": "t10k-images-idx3-ubyte.gz",
        "test labels": "t10k-labels-idx1-ubyte.gz",
    },
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "ylecun/mnist",
    "77f3279092a1c1579b2250db8eafed0ad422088c",
)
_CIFAR = Source(
    "cifar10",
    ("cifar-10-batches-bin", "cifar10", ""),
    {**{f"train {i}": f"data_batch_{i}.bin" for i in range(1, 6)}, "test": "test_batch.bin"},
    "https://www.cs.toronto.edu/~kriz/cifar.html (the binary version)",
    "uoft-cs/cifar10",
    "0b2714987fa478483af9968de7c934580d0bb9a2",
)
Splits = dict[str, tuple[np.ndarray, np.ndarray]]  # images [n, pixels] uint8, and classes
# Contour lengths of Pathfinder and LRA's names of their folders.
_CONTOURS = {14: "curv_contour_length_14", 9: "curv_contour_length_9", 6: "curv_baseline"}


@dataclass(frozen=True)
class Images(StoredTask):
    """The base of tasks on pictures. `column` is that of the Hub's rows."""

    column: ClassVar[str] = "image"
    channels: ClassVar[int] = 1
    classes: ClassVar[int] = 10
    notes: ClassVar[tuple[str, ...]] = (
        "Validation is a tenth of the official training images, chosen by a hash of their pixels.",
    )

    def read(self, pixels: np.ndarray) -> np.ndarray:
        """Turn bytes [n, pixels] into what a model reads."""
        raise NotImplementedError

    def read_files(self, paths: Mapping[str, Path]) -> Splits:
        """Read official files. Raises UserError for wrong ones."""
        raise NotImplementedError

    def key(self, place: Place) -> dict[str, Any]:
        return self.source.key(place.folder)

    def splits(self, folder: Path | None) -> tuple[Splits, dict[str, Any]]:
        """Return all images, and where they come from."""
        if folder is None:
            splits = _from_hub(self.source, self.column)
        else:
            splits = self.read_files(self.source.find(folder))
        pixels, labels = splits["train"]
        held = held_out(map(bytes, pixels))
        for split, chosen in (("train", ~held), ("validation", held)):
            splits[split] = pixels[chosen], labels[chosen]
        return splits, self.source.origin(folder)

    def make(self, place: Place) -> Made:
        splits, origin = self.splits(place.folder)
        for split, (_, labels) in splits.items():
            if not len(labels):
                where = place.folder or "the hub"
                raise UserError(f"{self.name}: {where} has too few images: none is for {split}")
        return {split: (map(bytes, x), labels) for split, (x, labels) in splits.items()}, origin

    def examples(
        self, ids: np.ndarray, ends: np.ndarray, labels: np.ndarray, origin: dict[str, Any]
    ) -> Examples:
        pixels = ids.reshape(len(labels), -1)
        lengths = np.full(len(labels), self.length, dtype=np.int64)
        return Examples(lambda rows: (self.read(pixels[rows]), None), lengths, labels, origin)

    def shown(self, inputs: np.ndarray, origin: Mapping[str, Any]) -> str:
        """Write pixels as letters, the brighter the denser."""
        letters, side = np.array(list(" .:-=+*#%@")), math.isqrt(inputs.size)
        shades = (inputs.reshape(side, side) - inputs.min()) / max(np.ptp(inputs), 1e-9)
        chosen = letters[np.rint(shades * (len(letters) - 1)).astype(int)]
        return "\n".join("".join(line) for line in chosen)


@dataclass(frozen=True)
class SequentialMnist(Images):
    """MNIST, one pixel of 0 to 1 a position.

    Attributes:
        size: 28, or 14 for the means of 2×2 pixels.
    """

    name: ClassVar[str] = "smnist"
    kept_as: ClassVar[str] = "mnist"
    source: ClassVar[Source] = _MNIST
    official: ClassVar[dict[str, int]] = {"train": 60_000, "validation": 0, "test": 10_000}
    size: int = 28

    def __post_init__(self) -> None:
        check_choice(self, "size", (28, 14))

    @property
    def length(self) -> int:
        return self.size**2

    def read(self, pixels: np.ndarray) -> np.ndarray:
        values = pixels.astype(np.float32) / 255
        if self.size == 14:
            values = values.reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4)).reshape(-1, 196)
        return values[:, self.positions(), None]

    def positions(self) -> np.ndarray:
        """Return the order [T] in which pixels are read."""
        return np.arange(self.length)

    def read_files(self, paths: Mapping[str, Path]) -> Splits:
        splits = {}
        for split in ("train", "test"):
            images = _read_idx(paths[f"{split} images"], 3)
            labels = _read_idx(paths[f"{split} labels"], 1)
            if images.shape != (len(labels), 28, 28) or not len(labels) or labels.max() > 9:
                _MNIST.refuse(
                    paths[f"{split} labels"],
                    f"has {len(labels):,} labels up to {labels.max(initial=0)}, with images of "
                    f"{' x '.join(map(str, images.shape))}; must have as many from 0 to 9 as "
                    "there are images of 28 x 28",
                )
            splits[split] = images.reshape(-1, 28 * 28), labels
        return splits


@dataclass(frozen=True)
class PermutedMnist(SequentialMnist):
    """MNIST in one fixed other order of its pixels.

    Attributes:
        order: bit-reversal, S4's; or the seed of a random one (92916 is that of earlier papers).
    """

    name: ClassVar[str] = "pmnist"
    order: int | str = "bit-reversal"

    def __post_init__(self) -> None:
        super().__post_init__()
        is_seed = isinstance(self.order, int) and 0 <= self.order < 2**32
        if self.order != "bit-reversal" and not is_seed:
            raise ValueError(
                f"order={self.order}: must be bit-reversal or the seed of an order, below 2**32"
            )

    def positions(self) -> np.ndarray:
        if isinstance(self.order, int):
            # The old generator: its numbers never change, and earlier papers' order is its.
            return np.random.RandomState(self.order).permutation(self.length)
        bits = (self.length - 1).bit_length()
        reverse = np.array([int(f"{number:0{bits}b}"[::-1], 2) for number in range(2**bits)])
        return reverse[reverse < self.length]


@dataclass(frozen=True)
class Cifar10(Images):
    """CIFAR-10 in grey, row by row.

    Attributes:
        mean, deviation: of grey values, S4's.
        pixels: real, less the mean and over the deviation; or ids from 0 to 255, as LRA's own
            models read.
    """

    name: ClassVar[str] = "cifar10"
    kept_as: ClassVar[str] = "cifar10"
    source: ClassVar[Source] = _CIFAR
    column: ClassVar[str] = "img"
    official: ClassVar[dict[str, int]] = {"train": 50_000, "validation": 0, "test": 10_000}
    length: ClassVar[int] = 32**2
    mean: ClassVar[float] = 122.6
    deviation: ClassVar[float] = 61.0
    pixels: str = "real"

    def __post_init__(self) -> None:
        check_choice(self, "pixels", ("real", "ids"))

    @property
    def vocabulary(self) -> int:
        return 256 if self.pixels == "ids" else 0

    @property
    def channels(self) -> int:
        return 0 if self.pixels == "ids" else 1

    def read(self, pixels: np.ndarray) -> np.ndarray:
        if self.pixels == "ids":
            return pixels.astype(np.int64)
        return ((pixels - np.float32(self.mean)) / np.float32(self.deviation))[:, :, None]

    def read_files(self, paths: Mapping[str, Path]) -> Splits:
        found: dict[str, list[np.ndarray]] = {"train": [], "test": []}
        for kind, path in paths.items():
            data = _CIFAR.read(path)
            size = 1 + 3 * self.length  # A row has a label, then red, green and blue values.
            if not data or len(data) % size:
                what = f"{len(data):,} bytes, must be images of {size:,} bytes each"
                _CIFAR.refuse(path, f"is truncated or another file: {what}")
            records = np.frombuffer(data, dtype=np.uint8).reshape(-1, size)
            if records[:, 0].max() > 9:
                _CIFAR.refuse(path, f"has the label {records[:, 0].max()}, must be from 0 to 9")
            found[kind.split()[0]].append(records)
        every = {split: np.concatenate(parts) for split, parts in found.items()}
        return {
            split: (grey(records[:, 1:].reshape(len(records), 3, -1).mT), records[:, 0])
            for split, records in every.items()
        }


@dataclass(frozen=True)
class Pathfinder(Cifar10):
    """Two classes: apart, joined. Pixels are real from −1 to 1, or ids.

    Attributes:
        size: 32 or 128 pixels a side.
        contour: dashes of each target: 14, LRA's hard one, 9 or 6.
    """

    name: ClassVar[str] = "pathfinder"
    kept_as: ClassVar[str] = "pathfinder"
    official: ClassVar[dict[str, int]] = {"train": 160_000, "validation": 20_000, "test": 20_000}
    needs_folder: ClassVar[bool] = True
    classes: ClassVar[int] = 2
    mean: ClassVar[float] = 127.5
    deviation: ClassVar[float] = 127.5
    notes: ClassVar[tuple[str, ...]] = (
        "Validation and test are a tenth of the official images each, by a hash.",
    )
    size: int = 32
    contour: int = 14

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "size", (32, 128))
        check_choice(self, "contour", tuple(_CONTOURS))

    @property
    def length(self) -> int:
        return self.size**2

    @property
    def source(self) -> Source:
        name = f"pathfinder{self.size}/{_CONTOURS[self.contour]}"
        return Source("pathfinder", (name, f"lra_release/{name}"), {"lists": "metadata"}, LRA)

    def splits(self, folder: Path | None) -> tuple[Splits, dict[str, Any]]:
        lists = self.source.find(folder)["lists"]
        named = list(self._images(lists))
        # The release has an image without bytes.
        kept = [x for x in named if not (x[0].is_file() and x[0].stat().st_size == 0)]
        if not kept:
            self.source.refuse(lists, "has no list (NUMBER.npy) of an image that has bytes")
        pixels = np.stack([self._pixels(path) for path, _ in kept])
        labels = np.array([label for _, label in kept])
        test = held_out(map(bytes, pixels))
        validation = held_out(map(bytes, pixels), 2 * HELD_OUT) & ~test
        rows = {"train": ~test & ~validation, "validation": validation, "test": test}
        digest = hashlib.sha256(pixels)
        digest.update(labels)
        found = {"folder": lists.parent.name, "images": len(kept)}
        found |= {"empty_files": len(named) - len(kept), "sha256": digest.hexdigest()}
        return {split: (pixels[x], labels[x]) for split, x in rows.items()}, found

    def _images(self, lists: Path) -> Iterator[tuple[Path, int]]:
        """Yield the path and the class of each image in the order of the lists."""
        numbered = [path for path in lists.glob("*.npy") if path.stem.isdigit()]
        for path in sorted(numbered, key=lambda path: int(path.stem)):
            for number, line in enumerate(read_text(path).splitlines(), 1):
                columns = line.split()
                if len(columns) < 4 or columns[3] not in ("0", "1"):
                    what = f"{clipped(line)!r} is no folder, file, number and class"
                    self.source.refuse(f"{path}, line {number}", what)
                yield lists.parent / columns[0] / columns[1], int(columns[3])

    def _pixels(self, path: Path) -> np.ndarray:
        try:
            image = _decoded(path)
        # Pillow's error at unknown bytes is an OSError, of a zero byte in the name a ValueError.
        except (OSError, SyntaxError, ValueError):
            self.source.refuse(path, "is missing, truncated or no PNG image")
        if image.shape != (self.size, self.size):
            height, width = image.shape
            self.source.refuse(path, f"is {height}×{width}, must be {self.size}×{self.size}")
        return image.ravel()


def _read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read a file of idx: big-endian, a magic number, sizes, then bytes (LeCun, Cortes, Burges)."""
    data, header = _MNIST.read(path), 4 + 4 * dimensions
    magic = (8 * 256 + dimensions).to_bytes(4, "big")  # 8 is the code of unsigned bytes.
    sizes = [int.from_bytes(data[place : place + 4], "big") for place in range(4, header, 4)]
    if data[:4] != magic or len(data) != header + math.prod(sizes):
        _MNIST.refuse(
            path,
            f"is truncated or another file: {len(data):,} bytes that begin with "
            f"{data[:4].hex()}, must begin with {magic.hex()} and have the bytes that its header "
            f"says ({header} + {' x '.join(map(str, sizes))})",
        )
    return np.frombuffer(data, dtype=np.uint8, offset=header).reshape(sizes)


def grey(colours: np.ndarray) -> np.ndarray:
    """Turn [..., 3] bytes of red, green and blue into luma bytes (ITU-R 601, rounded as Pillow)."""
    weights = np.array([19595, 38470, 7471], dtype=np.uint32)
    return ((colours.astype(np.uint32) @ weights + 2**15) >> 16).astype(np.uint8)


def _decoded(image: Path | io.BytesIO) -> np.ndarray:
    """Decode a PNG in grey, [height, width] uint8."""
    from PIL import Image

    # Of Pillow's other formats some start programs, as PostScript does.
    with Image.open(image, formats=["PNG"]) as picture:
        return np.asarray(picture.convert("L"))


def _from_hub(source: Source, column: str) -> Splits:
    import datasets

    splits = {}
    for split in ("train", "test"):
        rows = source.rows(split).cast_column(column, datasets.Image(decode=False))
        pictures = [_decoded(io.BytesIO(row[column]["bytes"])).ravel() for row in rows]
        splits[split] = np.stack(pictures), np.array(rows["label"])
    return splits
