"""Texts too large to be held out as a whole: their last parts are, since no hash divides them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cat_lm.core.errors import UserError
from data_prep.sources.base import Part, Piece
from data_prep.sources.documents import (
    COMPRESSED,
    Malformed,
    Reading,
    Record,
    is_plain,
    read_file,
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
        """Return the two pieces, each as a part of its own."""
        return [
            self._part("train", 0, self.start, self.train_bytes),
            self._part("validation", self.start, self.characters, self.validation_bytes),
        ]

    def _part(self, split: str, start: int, stop: int, size: int) -> Part:
        file = self.file
        piece = Piece(start, stop, file.size)
        return Part(file.path, f"{split}/{file.name}", split, size, piece=piece)


def describe_divisions(divisions: Sequence[Division]) -> str:
    """Return the line that the log has of all texts that are divided."""
    first = divisions[0]
    held_out = sum(division.validation_bytes for division in divisions)
    total = held_out + sum(division.train_bytes for division in divisions)
    begin = f"held out: the last {held_out:,} of the {total:,} bytes of"
    if len(divisions) == 1:
        place = f"from the end of a {first.place} on"
        return f"{begin} {first.file.path}, a single document, {place}"
    larger = "each larger than what is held out of all files"
    return f"{begin} {len(divisions)} texts, {larger}; the first is {first.file.path}"


def with_text(files: list[Part]) -> list[Part]:
    """Return the files that are not empty; an empty compressed one is damaged, and is read."""
    return [file for file in files if file.size or str(file.path).lower().endswith(COMPRESSED)]


def divide(files: list[Part], reading: Reading, fraction: float) -> list[Division]:
    """Cut the texts that are too large to be held out, so that their last `fraction` can be.

    That is the only document of these files; of several text files, those which are larger than
    the `fraction` of all of them: held out as a whole they would be too much, and other, small
    files alone would be no measure of them. None where there is no document, or where it is too
    large to be encoded.

    Raises:
        UserError: the only document cannot be cut: it is too short, or a separator was to divide it
            and does not.
    """
    files = with_text(files)
    if len(files) > 1 and reading.separator is None:
        share = fraction * sum(file.text_bytes for file in files)
        large = (file for file in files if is_plain(file.path) and file.text_bytes > share)
        texts = ((file, _only_text(file, reading)) for file in large)
        return [cut for file, text in texts if text and (cut := _cut(file, text, fraction))]
    if len(files) != 1:
        return []
    (file,) = files
    text = _only_text(file, reading)
    if text is None:
        return []
    if reading.separator is not None and is_plain(file.path):
        raise UserError(
            f"--document-separator {reading.separator!r}: {file.path} is a single document by it, "
            "which leaves none to hold out; give another, or none to hold out the text's last part"
        )
    division = _cut(file, text, fraction)
    if division is None:
        raise UserError(
            f"{file.path}: a single document of {len(text.encode()):,} bytes, in which no line and "
            f"no word ends where its last {100 * fraction:.4g}% would be held out; give more text, "
            "--validation-path, or --document-separator"
        )
    return [division]


def _cut(file: Part, text: str, fraction: float) -> Division | None:
    data = text.encode()
    found = find_cut(data, fraction)
    if found is None:
        return None
    place, cut = found
    start = len(data[:cut].decode())
    return Division(file, place, start, len(text), cut, len(data) - cut)


def _only_text(file: Part, reading: Reading) -> str | None:
    text = None
    for number, item in enumerate(read_file(file.path, file.name, file.size, reading)):
        if number == LOOKED_AT:
            return None
        if isinstance(item, Malformed) and is_plain(file.path):
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
    """Yield the part's piece of the only document among `records`.

    What is no document or has no text comes out with the training piece alone, to be counted once.
    """
    for item in records:
        if not isinstance(item, Malformed) and item[0]:
            text, record = item
            yield text[part.piece.start : part.piece.stop], record
        elif part.split == "train":
            yield item
