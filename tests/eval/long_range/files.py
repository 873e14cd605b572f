"""Small files in the layouts of the official data sets."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

_RNG = np.random.default_rng(0)
MNIST = {
    split: (_RNG.integers(0, 256, (count, 28, 28), dtype=np.uint8), _RNG.integers(0, 10, count))
    for split, count in (("train", 40), ("t10k", 7))
}
PAIRS = [("1.0", "P1", "P2", 'of "trees"', "a longer text"), ("0", "P3", "P4", "", "b\tc")]
_LIST = "imgs/0 sample_{}.png {} {} 1.0 14 4 2 0.5 1 1\n"


def idx(values: np.ndarray) -> bytes:
    """Lay out an array as MNIST's files are."""
    header = (2048 + values.ndim).to_bytes(4, "big")
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return header + sizes + values.astype(np.uint8).tobytes()


def write_mnist(folder: Path, packed: bool = True) -> None:
    folder.mkdir(parents=True)
    for split, (images, labels) in MNIST.items():
        for name, values in (("images-idx3", images), ("labels-idx1", labels)):
            path = folder / f"{split}-{name}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(idx(values)) if packed else idx(values))


def cifar(count: int, seed: int) -> np.ndarray:
    """Draw records of a label and 3,072 colours."""
    records = np.random.default_rng(seed).integers(0, 256, (count, 3073), dtype=np.uint8)
    records[:, 0] %= 10
    return records


def write_cifar(folder: Path) -> None:
    folder.mkdir(parents=True)
    for number in range(1, 6):
        (folder / f"data_batch_{number}.bin").write_bytes(cifar(4, number).tobytes())
    (folder / "test_batch.bin").write_bytes(cifar(3, 9).tobytes())


def write_folder(root: Path, images: int = 20, size: int = 32) -> Path:
    """Write images of Pathfinder with their list; return their folder."""
    base = root / "pathfinder32" / "curv_contour_length_14"
    (base / "metadata").mkdir(parents=True)
    (base / "imgs" / "0").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(images):
        pixels = rng.integers(0, 256, (size, size), dtype=np.uint8)
        Image.fromarray(pixels).save(base / f"imgs/0/sample_{number}.png")
    lines = [_LIST.format(number, number, number % 2) for number in range(images)]
    (base / "metadata" / "0.npy").write_text("".join(lines))
    return base


def write_files(
    folder: Path, rows: Sequence[tuple[str, object]], left_out: Collection[str] = ()
) -> None:
    """Write LRA's files of ListOps, with the same rows in every split."""
    folder.mkdir(parents=True)
    lines = ["Source\tTarget", *(f"{source}\t{target}" for source, target in rows)]
    for name in ("train", "val", "test"):
        if name not in left_out:
            (folder / f"basic_{name}.tsv").write_bytes("\r\n".join([*lines, ""]).encode())


def write_reviews(root: Path, others: Mapping[tuple[str, str, int], str] | None = None) -> None:
    """Write IMDB's folders; `others`: (split, kind, number) -> text, in place of the usual."""
    for split in ("train", "test"):
        for kind in ("pos", "neg"):
            folder = root / "aclImdb" / split / kind
            folder.mkdir(parents=True)
            for number in range(20):
                text = f"{split} {kind} review {number} of a film"
                text = (others or {}).get((split, kind, number), text)
                (folder / f"{number}_{7 if kind == 'pos' else 2}.txt").write_bytes(text.encode())
    (root / "aclImdb" / "train" / "unsup").mkdir()
    (root / "aclImdb" / "train" / "unsup" / "0_0.txt").write_text("of nobody's opinion")


def write_pairs(
    folder: Path,
    rows: Sequence[Sequence[str]] = PAIRS,
    names: Collection[str] = ("train", "eval", "test"),
) -> None:
    """Write AAN's tables, with the same rows in every split."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        with open(folder / f"new_aan_pairs.{name}.tsv", "w", newline="") as stream:
            csv.writer(stream, delimiter="\t").writerows(rows)
