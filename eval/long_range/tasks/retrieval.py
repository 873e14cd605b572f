"""Retrieval: does one paper of the ACL Anthology Network cite another (LRA's pairs)?"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from cat_lm.core.readers import clipped
from eval.long_range.tasks.base import Examples, Place
from eval.long_range.tasks.hub import Pinned
from eval.long_range.tasks.official import LRA, Files, Layout, find
from eval.long_range.tasks.rows import Sequences, save_sequences
from eval.long_range.tasks.store import Work, stored
from eval.long_range.tasks.text import Bytes, Characters, Encoder, TextTask

_NAMES = {"train": "train", "validation": "eval", "test": "test"}
_FILES = {split: (f"new_aan_pairs.{name}.tsv",) for split, name in _NAMES.items()}
_LAYOUT = Layout(
    "aan",
    ("tsv_data", "lra_release/tsv_data", "aan", ""),
    f"{LRA}, or the Hub's OpenNLPLab/lra, data/aan",
)
_HUB = Pinned(
    "OpenNLPLab/lra",
    "6cb133c44f406da743661488df9e977b87d98775",
    "DIR/tsv_data/new_aan_pairs.train.tsv and its two companions",
)
_COLUMNS = 5  # label, id, id, text, text
_LONGEST = 2**27  # characters of a text; csv's own bound is lower


class Pair(NamedTuple):
    """Two texts, and whether one cites the other."""

    label: int
    texts: tuple[str, str]


@dataclass(frozen=True)
class Retrieval(TextTask):
    """Two classes, of two documents that one encoder reads; `max_length` is of each."""

    name: ClassVar[str] = "aan"
    towers: ClassVar[int] = 2
    official: ClassVar[dict[str, int]] = {"train": 147_086, "validation": 18_090, "test": 17_437}
    max_length: int = 4_000

    def load(self, split: str, place: Place | None = None) -> Examples:
        place = place or Place()
        files = None if place.folder is None else find(place.folder, _LAYOUT, _FILES)
        key = _HUB.key() if files is None else files.key()
        kept = stored(
            place, self.name, {**self.describe(), **key}, lambda work: self._save(work, files)
        )
        return Sequences(kept, split, self.length, self.towers)

    def _save(self, work: Work, files: Files | None) -> dict[str, Any]:
        if files is None:
            paths = {s: _HUB.file(f"data/aan/{_FILES[s][0]}") for s in _FILES}
            origin = {**_HUB.key(), **Files(_LAYOUT, paths).origin()}
        else:
            paths, origin = files.paths, files.origin()
        encoder: Encoder = Bytes(self.max_length)
        if self.level == "characters":
            texts = (text for pair in read_pairs(paths["train"]) for text in pair.texts)
            encoder = Characters(texts, self.max_length)
            origin["characters"] = encoder.characters
        for split, path in paths.items():
            labels: list[int] = []
            save_sequences(work, split, _encoded(read_pairs(path), encoder, labels), labels)
            if len(labels) != self.official[split]:
                _check_end(path)
        return origin


def _check_end(path: Path) -> None:
    """Refuse a file whose last row has no end, where it has not as many as the official one."""
    with open(path, "rb") as stream:
        stream.seek(-1, os.SEEK_END)
        if stream.read() != b"\n":
            _LAYOUT.refuse(path, "is truncated: its last row has no end")


def _encoded(pairs: Iterator[Pair], encoder: Encoder, labels: list[int]) -> Iterator[bytes]:
    for pair in pairs:
        labels.append(pair.label)
        yield from map(encoder.encode, pair.texts)


def read_pairs(path: Path) -> Iterator[Pair]:
    """Read a file of pairs, a row at a time.

    Raises:
        UserError: a row has other columns or another label, or the file is not UTF-8; and where it
            has no row.
    """
    before = csv.field_size_limit(_LONGEST)
    number = 0
    try:
        with open(path, encoding="utf-8", newline="") as stream:
            for number, row in enumerate(csv.reader(stream, delimiter="\t"), 1):
                where = f"{path}, row {number}"
                if len(row) != _COLUMNS:
                    many = f"has {len(row)} columns, must have label, id, id, text, text"
                    _LAYOUT.refuse(where, f"{many}: truncated or another file")
                if row[0] not in ("0", "1", "0.0", "1.0"):
                    _LAYOUT.refuse(where, f"has the label {clipped(row[0])!r}, must be 0 or 1")
                yield Pair(int(float(row[0])), (row[3], row[4]))
    except UnicodeDecodeError:
        _LAYOUT.refuse(f"{path}, after row {number}", "is not UTF-8 text")
    except csv.Error as error:
        _LAYOUT.refuse(f"{path}, after row {number}", f"is no table ({error})")
    finally:
        csv.field_size_limit(before)
    if not number:
        _LAYOUT.refuse(path, "is empty")
