"""Divide texts that are too large for the validation split, which gets their last part."""

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

LOOKED_AT = 1000  # After this number of records a file is not divided.
ENDS = (("line", rb"\n"), ("word", rb"\s"))  # where a text may be cut, the better place first


@dataclass(frozen=True)
class Division:
    """The division of a file's only document into training and validation text.

    Attributes:
        file: the file.
        place: the text's part that ends at the cut, `line` or `word`.
        start: the first character of the validation text.
        characters: the number of characters of the document.
        train_bytes, validation_bytes: sizes of the UTF-8 text before and after the cut.
    """

    file: Part
    place: str
    start: int
    characters: int
    train_bytes: int
    validation_bytes: int

    def parts(self) -> list[Part]:
        """Return the training and the validation piece as parts."""
        return [
            self._part("train", 0, self.start, self.train_bytes),
            self._part("validation", self.start, self.characters, self.validation_bytes),
        ]

    def _part(self, split: str, start: int, stop: int, size: int) -> Part:
        file = self.file
        piece = Piece(start, stop, file.size)
        return Part(file.path, f"{split}/{file.name}", split, size, piece=piece)


def describe_divisions(divisions: Sequence[Division]) -> str:
    """Return the line for the log about all divided texts."""
    first = divisions[0]
    held_out = sum(division.validation_bytes for division in divisions)
    total = held_out + sum(division.train_bytes for division in divisions)
    begin = f"held out: the last {held_out:,} of the {total:,} bytes of"
    if len(divisions) == 1:
        place = f"from the end of a {first.place} on"
        return f"{begin} {first.file.path}, a single document, {place}"
    larger = "each larger than what is held out of all files"
    return f"{begin} {len(divisions)} texts, {larger}; the first is {first.file.path}"


def drop_empty(files: list[Part]) -> list[Part]:
    """Return the non-empty files, and empty compressed ones, whose damage is then reported."""
    return [file for file in files if file.size or str(file.path).lower().endswith(COMPRESSED)]


def divide(files: list[Part], reading: Reading, fraction: float) -> list[Division]:
    """Return divisions of the texts that are too large for the validation split.

    A single document is divided, with its last `fraction` for validation. Of several text files,
    those larger than `fraction` of all text are divided, because they would be too much for the
    validation split, and small files alone would not represent them. No division is made without
    documents, or of one that is too large to be encoded.

    Raises:
        UserError: the only document is too short to be divided, or --document-separator was given
            and does not occur in it.
    """
    files = drop_empty(files)
    if len(files) > 1 and reading.separator is None:
        share = fraction * sum(file.text_bytes for file in files)
        large = (file for file in files if is_plain(file.path) and file.text_bytes > share)
        texts = ((file, _read_only_text(file, reading)) for file in large)
        return [cut for file, text in texts if text and (cut := _divide_text(file, text, fraction))]
    if len(files) != 1:
        return []
    (file,) = files
    text = _read_only_text(file, reading)
    if text is None:
        return []
    if reading.separator is not None and is_plain(file.path):
        raise UserError(
            f"--document-separator {reading.separator!r}: {file.path} is a single document by it, "
            "which leaves none to hold out; give another, or none to hold out the text's last part"
        )
    division = _divide_text(file, text, fraction)
    if division is None:
        raise UserError(
            f"{file.path}: a single document of {len(text.encode()):,} bytes, in which no line and "
            f"no word ends where its last {100 * fraction:.4g}% would be held out; give more text, "
            "--validation-path, or --document-separator"
        )
    return [division]


def _divide_text(file: Part, text: str, fraction: float) -> Division | None:
    data = text.encode()
    found = find_cut(data, fraction)
    if found is None:
        return None
    place, cut = found
    start = len(data[:cut].decode())
    return Division(file, place, start, len(text), cut, len(data) - cut)


def _read_only_text(file: Part, reading: Reading) -> str | None:
    text = None
    for number, item in enumerate(read_file(file.path, file.name, file.size, reading)):
        if number == LOOKED_AT:
            return None
        if isinstance(item, Malformed) and is_plain(file.path):
            return None  # It is a document that is too large.
        if isinstance(item, Malformed) or not item[0]:
            continue
        if text is not None:
            return None
        text = item[0]
    return text


def find_cut(data: bytes, fraction: float) -> tuple[str, int] | None:
    """Return where to cut off about the last `fraction` of a UTF-8 text: (line or word, byte).

    It is the line end that is nearest to the fraction, or a word end if no line ends between half
    and twice the fraction. Both sides have more than whitespace. Return None if there is no such
    place.
    """
    size, wanted = len(data), len(data) * (1 - fraction)
    low = max(size - len(data.lstrip()) + 1, int(size * (1 - 2 * fraction)))
    high = min(len(data.rstrip()) - 1, int(size * (1 - fraction / 2)))
    for place, pattern in ENDS:
        # The end at `low` is matched by the character before it.
        window = re.compile(pattern).finditer(data, max(0, low - 1), max(0, high))
        ends = (match.end() for match in window)
        if cut := min(ends, key=lambda end: abs(end - wanted), default=None):
            return place, cut
    return None


def take_piece(records: Iterator[Record | Malformed], part: Part) -> Iterator[Record | Malformed]:
    """Yield a part's piece of the only document among `records`.

    Malformed and empty records are yielded with the training piece only, so that they count once.
    """
    for item in records:
        if not isinstance(item, Malformed) and item[0]:
            text, record = item
            yield text[part.piece.start : part.piece.stop], record
        elif part.split == "train":
            yield item
