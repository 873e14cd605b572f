"""A single document as a source: its last part is held out, since no hash of it can divide it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from cat_lm.errors import UserError
from data_prep.sources.base import Part, Piece
from data_prep.sources.documents import (
    COMPRESSED,
    MAX_DOCUMENT,
    PLAIN,
    Malformed,
    Reading,
    Record,
    read_file,
    suffix_of,
)

LOOKED_AT = 1000  # records without a second document: then a file is left as it is
ENDS = (("line", rb"\n"), ("word", rb"\s"))  # of what a text may be cut at, the better one first


@dataclass(frozen=True)
class Division:
    """A file's only document, cut before character `start` of `characters`, at the end of `place`.

    `train_bytes` and `validation_bytes` are of the UTF-8 text before and behind the cut.
    """

    file: Part
    place: str
    start: int
    characters: int
    train_bytes: int
    validation_bytes: int

    def parts(self) -> list[Part]:
        """The two pieces, each a part of its own."""
        file = self.file
        ranges = {
            "train": (0, self.start, self.train_bytes),
            "validation": (self.start, self.characters, self.validation_bytes),
        }
        return [
            Part(
                file.path,
                f"{split}/{file.name}",
                split,
                size,
                piece=Piece(start, stop, file.size),
            )
            for split, (start, stop, size) in ranges.items()
        ]

    def note(self) -> str:
        """The line that the log has of it."""
        total = self.train_bytes + self.validation_bytes
        return (
            f"held out: the last {self.validation_bytes:,} of the {total:,} bytes of "
            f"{self.file.path}, a single document, from the end of a {self.place} on"
        )

    def describe(self) -> dict:
        """Describe it for the manifest."""
        return {
            "at_end_of": self.place,
            "train_bytes": self.train_bytes,
            "validation_bytes": self.validation_bytes,
        }


def divide(files: list[Part], reading: Reading, fraction: float) -> Division | None:
    """Cuts the only document of these files, so that its last `fraction` can be held out.

    None where there are several documents, none, or one that is too large to be encoded. Raises
    `UserError` for a document that cannot be cut: it is too short, or a separator was to divide it
    and does not.
    """
    # An empty file has no document; an empty compressed one is damaged, which reading it says.
    files = [file for file in files if file.size or suffix_of(file.path) in COMPRESSED]
    if len(files) != 1:
        return None
    (file,) = files
    text = _only_text(file, reading)
    if text is None or len(text) > MAX_DOCUMENT:
        return None
    if reading.separator is not None and suffix_of(file.path) in PLAIN:
        raise UserError(
            f"--document-separator {reading.separator!r}: {file.path} is a single document by it, "
            "which leaves none to hold out; give another, or none to hold out the text's last part"
        )
    data = text.encode()
    found = find_cut(data, fraction)
    if found is None:
        raise UserError(
            f"{file.path}: a single document of {len(data):,} bytes, in which no line and no word "
            f"ends where its last {100 * fraction:.4g}% would be held out; give more text, "
            "--validation-path, or --document-separator"
        )
    place, cut = found
    start = len(data[:cut].decode())
    return Division(file, place, start, len(text), cut, len(data) - cut)


def _only_text(file: Part, reading: Reading) -> str | None:
    """The text of a file's only document; None for none, or more than one."""
    text = None
    for number, item in enumerate(read_file(file.path, file.name, file.size, reading)):
        if number == LOOKED_AT:
            return None
        if isinstance(item, Malformed) and suffix_of(file.path) in PLAIN:
            return None  # a document, too, but too large
        if isinstance(item, Malformed) or not item[0]:
            continue
        if text is not None:
            return None
        text = item[0]
    return text


def find_cut(data: bytes, fraction: float) -> tuple[str, int] | None:
    """Find the start of a UTF-8 text's last `fraction`: what ends there, and the byte behind it.

    That is the line's end nearest to it, and the word's where no line ends within half to twice of
    what is asked for. Both sides keep more than whitespace. None where there is no such place.
    """
    size, wanted = len(data), len(data) * (1 - fraction)
    low = max(size - len(data.lstrip()) + 1, int(size * (1 - 2 * fraction)))
    high = min(len(data.rstrip()) - 1, int(size * (1 - fraction / 2)))
    for place, pattern in ENDS:
        # An end is the place behind a character: that of the first possible one lies before `low`.
        window = re.compile(pattern).finditer(data, max(0, low - 1), max(0, high))
        ends = (match.end() for match in window)
        if cut := min(ends, key=lambda end: abs(end - wanted), default=None):
            return place, cut
    return None


def take_piece(records: Iterator[Record | Malformed], part: Part) -> Iterator[Record | Malformed]:
    """The part's piece of the only document among `records`.

    What is no document or has no text comes out with the training piece alone, to be counted once.
    """
    for item in records:
        if not isinstance(item, Malformed) and item[0]:
            text, record = item
            yield text[part.piece.start : part.piece.stop], record
        elif part.split == "train":
            yield item
