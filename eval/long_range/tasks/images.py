"""Images read pixel by pixel: MNIST in rows or permuted, CIFAR-10 in grey.

Neither has a validation split: a tenth of the training images, chosen by a hash of their pixels, is
held out. (S4 and LRA hold out a tenth too, but other ones.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from eval.long_range.tasks.base import Examples, Place, Task
from eval.long_range.tasks.hub import Pinned
from eval.long_range.tasks.idx import read_idx
from eval.long_range.tasks.official import Files, Layout, find, read_whole
from eval.long_range.tasks.rows import Pixels, held_out, save_pixels
from eval.long_range.tasks.store import Stored, Work, stored

HELD_OUT = 0.1
PIXELS = ("real", "ids")

_MNIST = Layout(
    "smnist", ("mnist", "MNIST/raw", ""), "https://ossci-datasets.s3.amazonaws.com/mnist"
)
_MNIST_FILES = {
    kind: (f"{name}-ubyte.gz", f"{name}-ubyte")
    for kind, name in {
        "train images": "train-images-idx3",
        "train labels": "train-labels-idx1",
        "test images": "t10k-images-idx3",
        "test labels": "t10k-labels-idx1",
    }.items()
}
_MNIST_HUB = Pinned(
    "ylecun/mnist",
    "77f3279092a1c1579b2250db8eafed0ad422088c",
    "DIR/mnist/train-images-idx3-ubyte.gz and its three companions",
)
_CIFAR = Layout(
    "cifar10",
    ("cifar-10-batches-bin", "cifar10", ""),
    "https://www.cs.toronto.edu/~kriz/cifar.html (the binary version)",
)
_CIFAR_FILES = {
    **{f"train {i}": (f"data_batch_{i}.bin",) for i in range(1, 6)},
    "test": ("test_batch.bin",),
}
_CIFAR_HUB = Pinned(
    "uoft-cs/cifar10",
    "0b2714987fa478483af9968de7c934580d0bb9a2",
    "DIR/cifar-10-batches-bin/data_batch_1.bin and its five companions",
)
_CIFAR_SIDE, _CIFAR_CLASSES = 32, 10
# S4's mean and deviation of grey values.
_GREY_MEAN, _GREY_DEVIATION = 122.6, 61.0


def picture(inputs: np.ndarray, darkest: float, brightest: float) -> str:
    """Write pixels [side²] as letters, the brighter the denser."""
    letters = np.array(list(" .:-=+*#%@"))
    side = math.isqrt(len(inputs))
    places = (inputs.reshape(side, side) - darkest) * (len(letters) / (brightest - darkest))
    chosen = letters[np.clip(places.astype(int), 0, len(letters) - 1)]
    return "\n".join("".join(line) for line in chosen)


def pixel_reader(kind: str, mean: float, deviation: float) -> Callable[[np.ndarray], np.ndarray]:
    """Return what reads [n, T] bytes as ids [n, T] or as reals [n, T, 1]."""
    if kind == "ids":
        return lambda pixels: pixels.astype(np.int64)
    return lambda pixels: ((pixels - np.float32(mean)) / np.float32(deviation))[:, :, None]


@dataclass(frozen=True)
class _Images(Task):
    @property
    def classes(self) -> int:
        return 10

    @property
    def notes(self) -> tuple[str, ...]:
        return (
            "Validation is a tenth of the official training images, chosen by a hash of their "
            "pixels.",
        )


@dataclass(frozen=True)
class SequentialMnist(_Images):
    """MNIST, one pixel of 0 to 1 a position.

    Attributes:
        size: 28, or 14 for the means of 2×2 pixels.
    """

    name: ClassVar[str] = "smnist"
    official: ClassVar[dict[str, int]] = {"train": 60_000, "validation": 0, "test": 10_000}
    size: int = 28

    def __post_init__(self) -> None:
        if self.size not in (28, 14):
            raise ValueError(f"size={self.size}: must be 28 or 14")

    @property
    def length(self) -> int:
        return self.size**2

    @property
    def vocabulary(self) -> int:
        return 0

    @property
    def channels(self) -> int:
        return 1

    def load(self, split: str, place: Place | None = None) -> Examples:
        return Pixels(_stored_mnist(place or Place()), split, self._read)

    def _read(self, pixels: np.ndarray) -> np.ndarray:
        values = pixels.astype(np.float32) / 255
        if self.size == 14:
            values = values.reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4)).reshape(-1, 196)
        return values[:, self.positions(), None]

    def shown(self, inputs: np.ndarray, origin: Mapping[str, Any]) -> str:
        return picture(inputs[:, 0], 0, 1)

    def positions(self) -> np.ndarray:
        """Return the order [T] in which pixels are read."""
        return np.arange(self.length)


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
        if isinstance(self.order, str) and self.order != "bit-reversal":
            raise ValueError(f"order={self.order}: must be bit-reversal or the seed of an order")
        if isinstance(self.order, int) and not 0 <= self.order < 2**32:
            raise ValueError(f"order={self.order}: must be from 0 to 2**32 − 1")

    def positions(self) -> np.ndarray:
        if isinstance(self.order, int):
            # The old generator: its numbers never change, and earlier papers' order is its.
            return np.random.RandomState(self.order).permutation(self.length)
        return bit_reversal(self.length)


def bit_reversal(count: int) -> np.ndarray:
    """Order 0..count−1 by their bits read backwards, in as many bits as the largest needs."""
    bits = (count - 1).bit_length()
    reverse = np.array([int(f"{number:0{bits}b}"[::-1], 2) for number in range(2**bits)])
    return reverse[reverse < count]


@dataclass(frozen=True)
class Cifar10(_Images):
    """CIFAR-10 in grey, row by row.

    Attributes:
        pixels: real, of mean 0 and deviation 1; or ids from 0 to 255, as LRA's own models read.
    """

    name: ClassVar[str] = "cifar10"
    official: ClassVar[dict[str, int]] = {"train": 50_000, "validation": 0, "test": 10_000}
    pixels: str = "real"

    def __post_init__(self) -> None:
        if self.pixels not in PIXELS:
            raise ValueError(f"pixels={self.pixels}: choose {' or '.join(PIXELS)}")

    @property
    def length(self) -> int:
        return _CIFAR_SIDE**2

    @property
    def vocabulary(self) -> int:
        return 256 if self.pixels == "ids" else 0

    @property
    def channels(self) -> int:
        return 0 if self.pixels == "ids" else 1

    def load(self, split: str, place: Place | None = None) -> Examples:
        reader = pixel_reader(self.pixels, _GREY_MEAN, _GREY_DEVIATION)
        return Pixels(_stored_cifar(place or Place()), split, reader)

    def shown(self, inputs: np.ndarray, origin: Mapping[str, Any]) -> str:
        reader = pixel_reader(self.pixels, _GREY_MEAN, _GREY_DEVIATION)
        darkest, brightest = reader(np.array([[0, 255]], dtype=np.uint8)).ravel()
        return picture(inputs.reshape(-1), darkest, brightest)


def grey(colours: np.ndarray) -> np.ndarray:
    """Turn [..., 3] bytes of red, green and blue into luma bytes (ITU-R 601, rounded as Pillow)."""
    weights = np.array([19595, 38470, 7471], dtype=np.uint32)
    return ((colours.astype(np.uint32) @ weights + 2**15) >> 16).astype(np.uint8)


def _stored_mnist(place: Place) -> Stored:
    if place.folder is None:
        return stored(place, "mnist", _MNIST_HUB.key(), lambda w: _save_hub(w, _MNIST_HUB, "image"))
    files = find(place.folder, _MNIST, _MNIST_FILES)
    return stored(place, "mnist", files.key(), lambda work: _save_idx(work, files))


def _stored_cifar(place: Place) -> Stored:
    if place.folder is None:
        return stored(place, "cifar10", _CIFAR_HUB.key(), lambda w: _save_hub(w, _CIFAR_HUB, "img"))
    files = find(place.folder, _CIFAR, _CIFAR_FILES)
    return stored(place, "cifar10", files.key(), lambda work: _save_binary(work, files))


def _save_idx(work: Work, files: Files) -> dict[str, Any]:
    found = {}
    for split in ("train", "test"):
        path = files.paths[f"{split} labels"]
        images = read_idx(files.paths[f"{split} images"], 3, files.layout)
        labels = read_idx(path, 1, files.layout)
        if len(images) != len(labels):
            files.layout.refuse(path, f"has {len(labels):,} labels for {len(images):,} images")
        where = files.paths[f"{split} images"]
        if not len(images):
            files.layout.refuse(where, "has no image")
        if images.shape[1:] != (28, 28):
            height, width = images.shape[1:]
            files.layout.refuse(where, f"has images of {height}×{width}, must be 28×28")
        if labels.max() > 9:
            files.layout.refuse(path, f"has the label {labels.max()}, must be from 0 to 9")
        found[split] = (images.reshape(-1, 28 * 28), labels)
    return _save_splits(work, found, files.origin())


def _save_binary(work: Work, files: Files) -> dict[str, Any]:
    found: dict[str, list[np.ndarray]] = {"train": [], "test": []}
    for kind, path in files.paths.items():
        data = read_whole(path, files.layout)
        size = 1 + 3 * _CIFAR_SIDE**2
        if not data or len(data) % size:
            whole = f"{len(data) // size:,} images of {size:,} bytes and {len(data) % size:,} more"
            files.layout.refuse(path, f"is truncated or another file: {len(data):,} bytes, {whole}")
        records = np.frombuffer(data, dtype=np.uint8).reshape(-1, size)
        if records[:, 0].max() >= _CIFAR_CLASSES:
            files.layout.refuse(path, f"has the label {records[:, 0].max()}, must be from 0 to 9")
        found[kind.split()[0]].append(records)
    splits = {}
    for split, parts in found.items():
        records = np.concatenate(parts)
        colours = records[:, 1:].reshape(len(records), 3, -1).transpose(0, 2, 1)
        splits[split] = (grey(colours), records[:, 0])
    return _save_splits(work, splits, files.origin())


def _save_hub(work: Work, pinned: Pinned, column: str) -> dict[str, Any]:
    splits = {}
    for split in ("train", "test"):
        pictures, labels = pinned.images(split, column, "L")
        pixels = np.stack([picture.ravel() for picture in pictures])
        splits[split] = (pixels, np.array(labels))
    return _save_splits(work, splits, pinned.key())


def _save_splits(
    work: Work, splits: dict[str, tuple[np.ndarray, np.ndarray]], origin: dict[str, Any]
) -> dict[str, Any]:
    """Keep the official test images as they are, and the training ones in two parts."""
    pixels, labels = splits["train"]
    held = held_out((row.tobytes() for row in pixels), HELD_OUT)
    save_pixels(work, "train", pixels[~held], labels[~held])
    save_pixels(work, "validation", pixels[held], labels[held])
    save_pixels(work, "test", *splits["test"])
    return origin
