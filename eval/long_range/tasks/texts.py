"""Texts read letter by letter: is a film's review good or bad, does one paper cite another?

The reviews are IMDB's (Maas et al., 2011), the papers those of the ACL Anthology Network in the
Long Range Arena's pairs. Letters are bytes as LRA reads them, or characters as S4 does.
"""

from __future__ import annotations

import csv
import itertools
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from cat_lm.core.readers import clipped, read_text
from cat_lm.mixers.parts.base import check_choice, check_counts
from eval.long_range.tasks.base import PAD, Place
from eval.long_range.tasks.sources import LRA, Source
from eval.long_range.tasks.store import Made, StoredTask, held_out

_UNKNOWN, _END, _FIRST = 1, 2, 3  # ids of characters; 0 is padding
_CHARACTERS = 256  # number of ids, for any data
LEAST = 15  # minimum count of a character in IMDB's training texts, as in S4
_IMDB = Source(
    "imdb",
    ("aclImdb", "imdb/aclImdb", ""),
    {
        f"{split} {kind}": f"{split}/{kind}"
        for split in ("train", "test")
        for kind in ("neg", "pos")
    },
    "https://ai.stanford.edu/~amaas/data/sentiment",
    "stanfordnlp/imdb",
    "e6281661ce1c48d982bc483cf8a173c1bbeb5d31",
)
_REVIEW = re.compile(r"([0-9]+)_[0-9]+\.txt")
_AAN = Source(
    "aan",
    ("tsv_data", "lra_release/tsv_data", "aan", ""),
    {
        "train": "new_aan_pairs.train.tsv",
        "validation": "new_aan_pairs.eval.tsv",
        "test": "new_aan_pairs.test.tsv",
    },
    f"{LRA}, or the Hub's OpenNLPLab/lra, data/aan",
    "OpenNLPLab/lra",
    "6cb133c44f406da743661488df9e977b87d98775",
)
_LONGEST = 2**27  # characters of a text; csv's own bound is lower
Encode = Callable[[str], bytes]


@dataclass(frozen=True)
class TextTask(StoredTask):
    """The base of tasks on texts.

    Attributes:
        level: characters, S4's, with an end; or bytes, LRA's.
        max_length: positions of a text that are read, from its beginning.
    """

    classes: ClassVar[int] = 2
    level: str = "characters"
    max_length: int = 2_048

    def __post_init__(self) -> None:
        check_choice(self, "level", ("characters", "bytes"))
        check_counts(self, "max_length")

    @property
    def length(self) -> int:
        return self.max_length

    @property
    def vocabulary(self) -> int:
        return _CHARACTERS if self.level == "characters" else 257  # 257 includes padding.

    def encoder(self, texts: Iterable[str], least: int = 1) -> tuple[Encode, dict[str, str]]:
        """Return what encodes a text, a byte for each id less one, and what an origin says of it.

        Characters have ids from 3 in the order of frequency in the training texts; a text is cut
        so that its end is kept.

        Args:
            texts: the training texts.
            least: times that a character must be there; the rarest beyond 253 are unknown too.
        """
        if self.level == "bytes":
            return lambda text: text.encode()[: self.max_length], {}
        most, seen = self.max_length - 1, Counter()
        for text in texts:
            seen.update(text[:most])
        frequent = sorted((-times, x) for x, times in seen.items() if times >= least)
        known = [character for _, character in frequent[: _CHARACTERS - _FIRST]]
        ids = {ord(character): chr(_FIRST - 1 + i) for i, character in enumerate(known)}
        table = defaultdict(lambda: chr(_UNKNOWN - 1), ids)

        def encode(text: str) -> bytes:
            return text[:most].translate(table).encode("latin-1") + bytes([_END - 1])

        return encode, {"characters": "".join(known)}

    def shown(self, inputs: np.ndarray, origin: Mapping[str, Any]) -> str:
        if self.level == "bytes":
            return bytes(int(i) - 1 for i in inputs if i).decode("utf-8", "replace")
        special = {PAD: "", _UNKNOWN: "\N{REPLACEMENT CHARACTER}", _END: ""}
        known = origin["characters"]
        return "".join(special[i] if i < _FIRST else known[i - _FIRST] for i in inputs)


@dataclass(frozen=True)
class Imdb(TextTask):
    """Two classes: bad, good.

    Attributes:
        protocol: clean holds out a tenth of the training texts for validation; lra validates on
            the test split, as LRA and S4 do.
    """

    name: ClassVar[str] = "imdb"
    source: ClassVar[Source] = _IMDB
    official: ClassVar[dict[str, int]] = {"train": 25_000, "validation": 0, "test": 25_000}
    protocol: str = "clean"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "protocol", ("clean", "lra"))

    @property
    def notes(self) -> tuple[str, ...]:
        said = "a tenth of the official training texts, chosen by a hash of them."
        if self.protocol == "lra":
            said = "the test split, as in LRA and S4; what is chosen by it is chosen on the test."
        return (f"protocol={self.protocol}: validation is {said}",)

    def make(self, place: Place) -> Made:
        splits = {split: _reviews(place.folder, split) for split in ("train", "test")}
        (train, labels), test = splits["train"], splits["test"]
        known = {"train_texts_in_test": len(set(train) & set(test[0]))}
        splits["validation"] = test
        if self.protocol == "clean":
            held = held_out(text.encode("utf-8", "surrogatepass") for text in train)
            for split, chosen in (("train", ~held), ("validation", held)):
                splits[split] = list(itertools.compress(train, chosen)), labels[chosen]
        encode, characters = self.encoder(splits["train"][0], LEAST)
        rows = {split: (map(encode, texts), of) for split, (texts, of) in splits.items()}
        return rows, {**characters, **known, **self.source.origin(place.folder)}


def _reviews(folder: Path | None, split: str) -> tuple[list[str], np.ndarray]:
    """Return the texts of a split, and their classes."""
    if folder is None:
        rows = _IMDB.rows(split)
        return list(rows["text"]), np.array(rows["label"], dtype=np.int64)
    found, texts, labels = _IMDB.find(folder), [], []
    for label, kind in enumerate(("neg", "pos")):
        place = found[f"{split} {kind}"]
        named = [
            (match, path) for path in place.iterdir() if (match := _REVIEW.fullmatch(path.name))
        ]
        if not named:
            _IMDB.refuse(place, "has no review (ID_STARS.txt)")
        named.sort(key=lambda pair: (int(pair[0][1]), pair[1].name))
        texts += [read_text(path) for _, path in named]
        labels += [label] * len(named)
    return texts, np.array(labels, dtype=np.int64)


@dataclass(frozen=True)
class Retrieval(TextTask):
    """Two classes, of two documents that one encoder reads; `max_length` is of each."""

    name: ClassVar[str] = "aan"
    source: ClassVar[Source] = _AAN
    towers: ClassVar[int] = 2
    official: ClassVar[dict[str, int]] = {"train": 147_086, "validation": 18_090, "test": 17_437}
    max_length: int = 4_000

    def make(self, place: Place) -> Made:
        if place.folder is None:
            paths = {s: _AAN.download(f"data/aan/{name}") for s, name in _AAN.files.items()}
        else:
            paths = _AAN.find(place.folder)
        every = (text for _, *texts in read_pairs(paths["train"]) for text in texts)
        encode, known = self.encoder(every)
        splits = {split: self._rows(split, path, encode) for split, path in paths.items()}
        return splits, {**known, **_AAN.origin(place.folder)}

    def _rows(
        self, split: str, path: Path, encode: Encode
    ) -> tuple[Iterator[bytes], Sequence[int]]:
        """Return the rows of a split as they are read, and the list that gets their labels."""
        labels: list[int] = []

        def rows() -> Iterator[bytes]:
            for label, *texts in read_pairs(path):
                labels.append(label)
                yield from map(encode, texts)
            # A row that was cut in its last text still has all columns.
            if len(labels) != self.official[split] and not _ends_line(path):
                _AAN.refuse(path, "is truncated: its last row has no end")

        return rows(), labels


def _ends_line(path: Path) -> bool:
    with open(path, "rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read() == b"\n"


def read_pairs(path: Path) -> Iterator[tuple[int, str, str]]:
    """Read a file of pairs, a row at a time: whether one cites the other, and both texts.

    Raises:
        UserError: a row has other columns or another label, or the file is not UTF-8; and where it
            has no row.
    """
    before, number = csv.field_size_limit(_LONGEST), 0
    try:
        with open(path, encoding="utf-8", newline="") as stream:
            for number, row in enumerate(csv.reader(stream, delimiter="\t"), 1):
                if len(row) != 5 or row[0] not in ("0", "1", "0.0", "1.0"):
                    what = f"has {len(row)} columns and the label {clipped((row or [''])[0])!r}"
                    must = "must have label (0 or 1), id, id, text, text: truncated or another file"
                    _AAN.refuse(f"{path}, row {number}", f"{what}, {must}")
                yield int(float(row[0])), row[3], row[4]
    except (UnicodeDecodeError, csv.Error) as error:
        _AAN.refuse(f"{path}, after row {number}", f"is no table in UTF-8 ({error})")
    finally:
        csv.field_size_limit(before)
    if not number:
        _AAN.refuse(path, "is empty")
