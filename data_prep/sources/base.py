"""A source of documents: parts in a fixed order, and a way to read each.

A part is a file, here or on the Hub, or a split that is streamed; so documents have one order, on
every machine and for any number of workers. Files are in natural order, in which runs of digits
count as numbers (chunk2 before chunk10); training text comes before validation text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cat_lm.core.errors import UserError, describe_os_error, file_error
from cat_lm.core.files import sha256
from cat_lm.core.readers import clipped
from data_prep.sources.documents import TEXT_PER_FILE_BYTE, Document, Malformed, Reading, suffix_of

HASHED_BYTES = 256_000_000  # of a source's files: about a second of hashing
UNKNOWN_SET = "unknown"
NAMED_IN_MANIFEST, NAMED_IN_LOG = 20, 3  # of files that are left out


@dataclass(frozen=True)
class Piece:
    """The characters [start, stop) of the only document of a file of `file_size` bytes."""

    start: int
    stop: int
    file_size: int


@dataclass(frozen=True)
class Part:
    """A piece of a source that is read in one go: a file, with the split it is known to be of.

    `name` is the same on every machine, and for a copy and the Hub. `size` is in bytes, None for a
    split that `datasets` streams; `sha256` is there where the Hub lists it. With `piece` the part
    is that much of the file's only document, and `size` counts the bytes of that text.
    """

    path: Path | str
    name: str
    split: str | None = None
    size: int | None = None
    sha256: str | None = None
    piece: Piece | None = None

    @property
    def text_bytes(self) -> int | None:
        """About how many bytes of text there are; None where it cannot be known beforehand."""
        if self.size is None or self.piece:
            return self.size
        return int(TEXT_PER_FILE_BYTE.get(suffix_of(self.path), 1.0) * self.size)


@dataclass(frozen=True)
class LeftOut:
    """Files that a path stands for and that are not read, for the log and the manifest."""

    reason: str
    files: int
    names: tuple[str, ...]  # of the first ones

    @classmethod
    def of(cls, reason: str, names: Sequence[str]) -> list[LeftOut]:
        """Return a list of the one entry that these files are, of none where there are none."""
        shown = tuple(clipped(name, 200) for name in names[:NAMED_IN_MANIFEST])
        return [cls(reason, len(names), shown)] if names else []

    def note(self) -> str:
        """Return the line that the log has of them."""
        more = ["…"] if self.files > NAMED_IN_LOG else []
        names = ", ".join([*self.names[:NAMED_IN_LOG], *more])
        return f"{self.reason} (files: {self.files:,}): {names}"


class Source:
    """Documents in a fixed order. Subclasses set `kind` and `parts` and implement `read`.

    A source can be pickled: its parts may be read in any process, in any order, any number of times
    with equal result.
    """

    kind: str
    parts: list[Part]
    left_out: Sequence[LeftOut] = ()

    def read(self, part: Part) -> Iterator[Document | Malformed]:
        """The documents of one part, in order, and in their places the lines that hold none.

        Raises `UserError` for a part that cannot be read as a whole.
        """
        raise NotImplementedError

    @property
    def has_validation(self) -> bool:
        """Return True if the source decides the split of every document."""
        return all(part.split for part in self.parts)

    def notes(self, held_out: float) -> list[str]:
        """Lines for the log on what is left out or, where that is not asked for, held out.

        `held_out` is the share of documents that is, where the source brings no split of its own.
        """
        return [entry.note() for entry in self.left_out]

    def text_bytes(self) -> int | None:
        """About how many bytes of text there are; None where it cannot be known beforehand."""
        sizes = [part.text_bytes for part in self.parts]
        return None if None in sizes else sum(sizes)

    def describe(self) -> dict:
        """Describe the source for the manifest; equal for equal input, on every machine.

        Local sources of up to `HASHED_BYTES` are described by the contents of their files too.
        Larger ones only by names and sizes, because reading terabytes to find that nothing is to
        be done takes hours: there, an edit that keeps a file's size is not noticed.

        Raises UserError where a file cannot be read.
        """
        listing = "".join(
            " ".join(filter(None, (part.name, str(part.size), part.sha256))) + "\n"
            for part in self.parts
        )
        size = None if any(p.size is None for p in self.parts) else sum(p.size for p in self.parts)
        description = {
            "kind": self.kind,
            "files": len({part.path for part in self.parts}),
            "file_bytes": size,
            "listing_sha256": hashlib.sha256(listing.encode()).hexdigest(),
        }
        local = all(isinstance(part.path, Path) for part in self.parts)
        if local and size <= HASHED_BYTES:
            description["contents_sha256"] = _contents_sha256(self.parts)
        return description


def counted_with(split: str | None) -> str:
    """Return the split whose documents a part's count with towards --max-documents and bytes."""
    return "validation" if split == "validation" else "train"


def read_once(
    parts: Iterable[Part], identity: Callable[[Part], Hashable]
) -> tuple[list[Part], list[LeftOut]]:
    """Return the parts without those that are one file with an earlier one, and these.

    Raises:
        UserError: a file is held out under one name and trained on under another.
    """
    first: dict[Hashable, Part] = {}
    repeated = []
    for part in parts:
        same = first.setdefault(identity(part), part)
        if same.split != part.split:
            raise UserError(
                f"{part.path}: is the same file as {same.path}, of another split; what is held out "
                "must not be trained on"
            )
        if same is not part:
            repeated.append(f"{part.name} is {same.name}")
    return list(first.values()), LeftOut.of("read once though listed again", repeated)


def set_name(record: dict, reading: Reading, default: str = UNKNOWN_SET) -> str:
    """The named set that a record belongs to; `default` where it names none.

    The objects on the way to it may be written out as JSON, as in some parquet mirrors. A name
    that cannot be printed comes with escapes.
    """
    value: object = record
    for key in reading.set_key.split("."):
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                return default
        value = value.get(key) if isinstance(value, dict) else None
    if not isinstance(value, str) or not value:
        return default
    return value if value.isprintable() else value.encode("unicode_escape").decode()


def sample_texts(
    source: Source,
    seed: int,
    max_bytes: int,
    is_training: Callable[[Document], bool],
    max_parts: int = 64,
) -> Iterator[str]:
    """About `max_bytes` of training text from up to `max_parts` parts, chosen by a hash of `seed`.

    Each part gives its share from its beginning, so that a sample of a huge corpus reads little.
    """
    parts = [part for part in source.parts if part.split != "validation"]
    parts.sort(key=lambda part: hashlib.sha256(f"{seed} {part.name}".encode()).digest())
    share = max(1, max_bytes // min(len(parts), max_parts))
    total = 0
    for part in parts:
        taken = 0
        for document in source.read(part):
            if taken >= share or total >= max_bytes:
                break
            if isinstance(document, Malformed) or not document.text:
                continue
            if not is_training(document):
                continue
            text = document.text[: max(share, max_bytes // 16)]
            taken += len(text)
            total += len(text)
            yield text
        if total >= max_bytes:
            return


def in_natural_order(parts: Iterable[Part]) -> list[Part]:
    """Parts by name, runs of digits in it taken as numbers: chunk1, chunk2, …, chunk10."""

    def key(part: Part) -> tuple[list[str | int], str]:
        pieces = re.split(r"([0-9]+)", part.name)  # text and digits in turn
        return [int(p) if i % 2 else p for i, p in enumerate(pieces)], part.name

    return sorted(parts, key=key)


def _contents_sha256(parts: Iterable[Part]) -> str:
    """One hash over the hashes of the parts' files, in the parts' order."""
    total = hashlib.sha256()
    for part in parts:
        try:
            total.update(bytes.fromhex(sha256(part.path)))
        except OSError as error:
            text = f"{part.path}: cannot be read ({describe_os_error(error)})"
            raise file_error(text, error) from None
    return total.hexdigest()
