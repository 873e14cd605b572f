"""IMDB: is a film's review good or bad (Maas et al., 2011), read letter by letter."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cat_lm.core.readers import read_text
from eval.long_range.tasks.base import Examples, Place
from eval.long_range.tasks.hub import Pinned
from eval.long_range.tasks.official import Layout, base_folder
from eval.long_range.tasks.rows import Sequences, held_out, save_sequences
from eval.long_range.tasks.store import Work, stored
from eval.long_range.tasks.text import Bytes, Characters, Encoder, TextTask

PROTOCOLS = ("clean", "lra")
HELD_OUT = 0.1
# Times that S4 wants to see a character in the training texts.
LEAST = 15
_LAYOUT = Layout(
    "imdb", ("aclImdb", "imdb/aclImdb", ""), "https://ai.stanford.edu/~amaas/data/sentiment"
)
_HUB = Pinned(
    "stanfordnlp/imdb",
    "e6281661ce1c48d982bc483cf8a173c1bbeb5d31",
    "DIR/aclImdb/train/pos and its three companions",
)
_CLASSES = {"neg": 0, "pos": 1}
_REVIEW = re.compile(r"([0-9]+)_[0-9]+\.txt")


class Reviews(NamedTuple):
    """Texts of a split and their classes."""

    texts: list[str]
    labels: np.ndarray


@dataclass(frozen=True)
class Imdb(TextTask):
    """Two classes: bad, good.

    Attributes:
        protocol: clean holds out a tenth of the training texts for validation; lra validates on
            the test split, as LRA and S4 do.
    """

    name: ClassVar[str] = "imdb"
    official: ClassVar[dict[str, int]] = {"train": 25_000, "validation": 0, "test": 25_000}
    protocol: str = "clean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.protocol not in PROTOCOLS:
            raise ValueError(f"protocol={self.protocol}: choose {' or '.join(PROTOCOLS)}")

    @property
    def notes(self) -> tuple[str, ...]:
        if self.protocol == "lra":
            return (
                "protocol=lra: validation is the test split, as in LRA and S4; what is chosen by "
                "it is chosen on the test.",
            )
        return (
            "protocol=clean: validation is a tenth of the official training texts, chosen by a "
            "hash of them.",
        )

    def load(self, split: str, place: Place | None = None) -> Examples:
        place = place or Place()
        if place.folder is None:
            key, reviews, origin = _HUB.key(), _from_hub, _HUB.key
        else:
            folder = ReviewFolder(place.folder)
            key, reviews, origin = folder.key(), folder.reviews, folder.origin

        def make(work: Work) -> dict[str, Any]:
            found = {name: reviews(name) for name in ("train", "test")}
            return {**origin(), **self._save(work, found)}

        kept = stored(place, self.name, {**self.describe(), **key}, make)
        return Sequences(kept, split, self.length)

    def _save(self, work: Work, found: dict[str, Reviews]) -> dict[str, Any]:
        train, test = found["train"], found["test"]
        splits = {"train": train, "validation": test, "test": test}
        if self.protocol == "clean":
            held = held_out(
                (text.encode("utf-8", "surrogatepass") for text in train.texts), HELD_OUT
            )
            splits["train"], splits["validation"] = _chosen(train, ~held), _chosen(train, held)
        encoder: Encoder = Bytes(self.max_length)
        if self.level == "characters":
            encoder = Characters(splits["train"].texts, self.max_length, LEAST)
        for name, reviews in splits.items():
            save_sequences(work, name, map(encoder.encode, reviews.texts), reviews.labels)
        known = {"characters": encoder.characters} if isinstance(encoder, Characters) else {}
        return {**known, "train_texts_in_test": len(set(train.texts) & set(test.texts))}


def _chosen(reviews: Reviews, rows: np.ndarray) -> Reviews:
    texts = [text for text, taken in zip(reviews.texts, rows, strict=True) if taken]
    return Reviews(texts, reviews.labels[rows])


def _from_hub(split: str) -> Reviews:
    rows = _HUB.rows(split)
    return Reviews(list(rows["text"]), np.array(rows["label"], dtype=np.int64))


class ReviewFolder:
    """The official folder: {train,test}/{pos,neg}/ID_STARS.txt."""

    def __init__(self, folder: Path) -> None:
        """Find the folder. Raises UserError where a part of it is missing or empty."""
        base = base_folder(folder, _LAYOUT, "train")
        self._files: dict[tuple[str, str], list[Path]] = {}
        for split in ("train", "test"):
            for kind in _CLASSES:
                place = base / split / kind
                if not place.is_dir():
                    _LAYOUT.refuse(place, "no such folder")
                found = [p for p in place.iterdir() if _REVIEW.fullmatch(p.name)]
                if not found:
                    _LAYOUT.refuse(place, "has no review (ID_STARS.txt)")
                self._files[split, kind] = sorted(found, key=_review_number)

    def _all(self) -> Iterator[Path]:
        for files in self._files.values():
            yield from files

    def key(self) -> dict[str, Any]:
        """Return what tells these files from changed ones, without reading them."""
        digest = hashlib.sha256()
        for path in self._all():
            state = path.stat()
            digest.update(
                f"{'/'.join(path.parts[-3:])} {state.st_size} {state.st_mtime_ns}\n".encode()
            )
        return {"files": digest.hexdigest()}

    def origin(self) -> dict[str, Any]:
        """Count the files, with a sha256 of all names and contents."""
        digest = hashlib.sha256()
        for path in self._all():
            content = path.read_bytes()
            name = "/".join(path.parts[-3:])
            digest.update(f"{name} {len(content)}\n".encode() + content)
        return {"files": sum(map(len, self._files.values())), "sha256": digest.hexdigest()}

    def reviews(self, split: str) -> Reviews:
        """Read a split. Raises UserError for a file that is not UTF-8."""
        texts, labels = [], []
        for kind, label in _CLASSES.items():
            for path in self._files[split, kind]:
                texts.append(read_text(path))
                labels.append(label)
        return Reviews(texts, np.array(labels, dtype=np.int64))


def _review_number(path: Path) -> tuple[int, str]:
    found = _REVIEW.fullmatch(path.name)
    return int(found[1]) if found else 0, path.name
