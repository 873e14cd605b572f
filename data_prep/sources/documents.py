"""Reading documents out of files: plain text and JSON lines, both also packed, and parquet.

A line or row that is no document comes out as `Malformed` in its place, for the caller to count.
What is wrong with a file as a whole (cut short, damaged, without the column) raises `UserError`.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import IO

from cat_lm.core.errors import UserError, describe_os_error, file_error
from cat_lm.core.readers import clipped
from data_prep.sources.presets import SET_KEY, TEXT_KEY

BLOCK = 1 << 20
# A file without line ends, such as one large JSON array, must not be read into memory as a whole.
MAX_LINE = 1 << 29
MAX_DOCUMENT = 1 << 26  # characters; encoding takes some 70 bytes of memory for each
SHOWN = 40  # characters of one that is too large
MAX_WINDOW = 1 << 31  # what `zstd --ultra --long=31` makes; the library's default is 2^27
# Of a packed file, unpacked in one call: zstd packs 128 KiB into 4 bytes, so 32 MiB at most.
PIECE = 1024
PLAIN = (".txt", ".md")
LINES = (".jsonl", ".ndjson")
# How much text a byte of such a file holds, for the estimate of disk space only.
PACKED = {".gz": 3.5, ".zst": 3.5, ".zstd": 3.5, ".bz2": 4.5, ".xz": 4.5}
TEXT_PER_FILE_BYTE = {
    **dict.fromkeys((*PLAIN, *LINES), 1.0),
    # A .json by itself is a description or one value; packed ones, as C4's, are JSON lines.
    **{kind + end: PACKED[end] for kind in (*PLAIN, *LINES, ".json") for end in PACKED},
    ".parquet": 1.75,  # compressed by snappy, as `datasets` writes it
}
KNOWN_KINDS = (
    f"{', '.join((*PLAIN, *LINES))}, each also with {', '.join(PACKED)}; JSON lines as .json.gz "
    "and so on; .parquet"
)
COMPRESSED = (*PACKED, ".parquet")  # of these no file has no bytes
PARQUET_ROWS = 16  # of a batch that is unpacked together


@dataclass(frozen=True)
class Document:
    """A text, the named set it belongs to, and its split where the source decides it."""

    text: str
    set: str
    split: str | None = None


@dataclass(frozen=True)
class Malformed:
    """A line or row that holds no document: where ("NAME:LINE" or "NAME: row N"), and why.

    NAME is the file's name within the source, the same on every machine.
    """

    where: str
    reason: str


@dataclass(frozen=True)
class Reading:
    """The rules by which files become documents.

    The key of the text, what separates documents in plain text, and the key of a document's named
    set, whose dots lead into objects: "meta.redpajama_set_name" in SlimPajama.
    """

    text_key: str = TEXT_KEY
    separator: str | None = None
    set_key: str = SET_KEY


Record = tuple[str, dict]


def suffix_of(path: PurePath | str) -> str | None:
    """Return the known suffix that a file's name ends with, or None."""
    name = PurePath(path).name.lower()
    return next((suffix for suffix in TEXT_PER_FILE_BYTE if name.endswith(suffix)), None)


def is_plain(path: PurePath | str) -> bool:
    """Return True if the file is plain text, packed or not: without a separator one document."""
    return (suffix_of(path) or "").startswith(PLAIN)


def read_file(path: Path, name: str, size: int, reading: Reading) -> Iterator[Record | Malformed]:
    """Yield the documents of a file on disk in order, as `read_records` does.

    Raises:
        UserError: it has not `size` bytes, or is written to while it is read: what the manifest
            says of the input would not be true.
    """
    try:
        with open(path, "rb") as stream:
            before = os.fstat(stream.fileno())
            if before.st_size == size:
                yield from read_records(stream, str(path), name, reading)
            after = os.stat(path)
            if (after.st_size, after.st_mtime_ns) != (size, before.st_mtime_ns):
                raise UserError(f"{path}: has changed since the preparation began; start it again")
    except OSError as error:
        # Libraries raise it too, with lines of their own.
        reason = describe_os_error(error) if error.errno else _one_line(str(error))
        raise file_error(f"{path}: cannot be read ({reason})", error) from None


def read_records(
    stream: IO[bytes], path: str, name: str, reading: Reading
) -> Iterator[Record | Malformed]:
    """Yield the documents of an open file in order: each one's text, and its record ({} in text).

    Args:
        path: tells the kind of the file by its suffix.
        name: is where a `Malformed` is said to be.

    Raises:
        UserError: names `path`, which is damaged or lacks the text's column.
    """
    suffix = suffix_of(path)
    if suffix == ".parquet":
        for number, row in enumerate(_parquet_rows(stream, path, reading), 1):
            yield _parse_row(row, f"{name}: row {number}", reading)
        return
    unpacked = io.BufferedReader(_Stream(_blocks(stream, path, suffix)), BLOCK)
    if is_plain(path):
        yield from _read_text(_decoded(unpacked, path), name, reading.separator)
        return
    for number, line in enumerate(_lines(unpacked, path), 1):
        if not line.isspace():
            yield _parse_line(line, f"{name}:{number}", reading)


def _document_of(record: object, where: str, reading: Reading) -> Record | Malformed:
    if not isinstance(record, dict):
        return Malformed(where, f"a JSON object is needed, not {type(record).__name__}")
    text = record.get(reading.text_key)
    if not isinstance(text, str):
        reason = f"no text under the key {reading.text_key!r}"
        if reading.text_key in record:
            found = f" but {'null' if text is None else type(text).__name__}"
        else:
            keys = ", ".join(map(str, list(record)[:20])) or "none"
            found = f"; its keys are {keys} (choose with --text-key)"
        return Malformed(where, _one_line(reason + found))
    if len(text) > MAX_DOCUMENT:
        return _too_large(where, text)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return Malformed(where, f"half a surrogate pair at {error.start}, not valid Unicode text")
    return text, record


def _parse_line(line: bytes, where: str, reading: Reading) -> Record | Malformed:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Malformed(where, _not_utf8(error))
    except (ValueError, RecursionError) as error:
        return Malformed(where, _one_line(f"not a JSON line ({error})"))
    return _document_of(record, where, reading)


def _not_utf8(error: UnicodeDecodeError, before: int = 0) -> str:
    return f"not UTF-8 (byte {error.object[error.start]:#04x} at {before + error.start})"


def _one_line(text: str) -> str:
    return clipped(" ".join(text.split()), 500)


def _read_text(
    pieces: Iterable[str], name: str, separator: str | None
) -> Iterator[Record | Malformed]:
    """Yield the documents of a text; its file may be larger than memory, no document may be."""
    held: list[str] = []  # of a document, before `text`, in which a separator may begin
    text, begin = "", None  # what a document that is too large begins with
    for piece in pieces:
        *texts, text = (text + piece).split(separator) if separator else [text + piece]
        for whole in texts:
            yield _ended(name, "".join((*held, whole)), begin)
            held, begin = [], None
        cut = max(0, len(text) - len(separator or " ") + 1)
        held.append(text[:cut])
        text = text[cut:]
        if sum(map(len, held)) > MAX_DOCUMENT:
            begin = "".join(held)[:SHOWN] if begin is None else begin
            if separator is None:
                break  # which the rest of the file, perhaps hundreds of gigabytes, does not mend
            held = []
    yield _ended(name, "".join((*held, text)), begin)


def _ended(name: str, text: str, begin: str | None) -> Record | Malformed:
    if begin is not None or len(text) > MAX_DOCUMENT:
        return _too_large(name, begin or text)
    return text, {}


def _decoded(stream: io.BufferedReader, path: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    read = 0
    while True:
        block = stream.read(BLOCK)
        first = read - len(decoder.getstate()[0])
        try:
            yield decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: {_not_utf8(error, first)}; convert it first") from None
        if not block:
            return
        read += len(block)


def _too_large(where: str, begin: str) -> Malformed:
    return Malformed(
        where,
        f"a document of more than {MAX_DOCUMENT / 1e6:.0f} million characters (it begins "
        f"{begin[:SHOWN]!r}) is too large to encode; cut a text file into documents with "
        "--document-separator",
    )


def _blocks(stream: IO[bytes], path: str, suffix: str) -> Iterator[bytes]:
    # All blocks hold at most `BLOCK` bytes, and are not empty.
    kind = suffix.rpartition(".")[2]
    kind = "zst" if kind == "zstd" else kind
    if f".{kind}" not in PACKED:
        yield from iter(lambda: stream.read(BLOCK), b"")
        return
    import zstandard

    errors = (EOFError, OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError)
    try:
        if kind == "gz":
            unpacked = gzip.GzipFile(fileobj=stream)
            yield from iter(lambda: unpacked.read(BLOCK), b"")
        else:
            yield from _unpacked(stream, kind)
        if not stream.tell():  # the libraries take no bytes for no text
            raise EOFError("it is empty")
    except errors as error:
        if getattr(error, "errno", None):  # the disk's; the libraries' own have none
            raise
        kind = {"gz": "gzip", "zst": "zstd"}.get(kind, kind)
        raise UserError(f"{path}: broken {kind} file ({_one_line(str(error))})") from None


def _unpacked(stream: IO[bytes], kind: str) -> Iterator[bytes]:
    """Yield the text of all frames of a zstd, bz2 or xz file, in blocks of at most `BLOCK`.

    Some kB unpack to gigabytes, so a call gets few bytes, or returns few. Unlike the libraries' own
    readers of files, a frame that is cut short, or garbage behind the last, is an error.
    """
    import zstandard

    frame, data = None, b""
    while data or (data := stream.read(PIECE)):
        if frame is None and kind == "zst":
            frame = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).decompressobj()
        elif frame is None:
            frame = lzma.LZMADecompressor() if kind == "xz" else bz2.BZ2Decompressor()
        if kind == "zst":
            block = frame.decompress(data)
            yield from (block[i : i + BLOCK] for i in range(0, len(block), BLOCK))
        else:
            while block := frame.decompress(data, BLOCK):
                yield block
                if frame.eof or frame.needs_input:
                    break
                data = b""
        data = b""
        if frame.eof:
            data, frame = frame.unused_data, None
    if frame is not None:
        raise EOFError("cut short")


class _Stream(io.RawIOBase):
    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        data = self._left or memoryview(next(self._blocks, b""))
        count = min(len(data), len(buffer))
        buffer[:count] = data[:count]
        self._left = data[count:]
        return count


def _lines(stream: io.BufferedReader, path: str) -> Iterator[bytes]:
    number = 0
    while line := stream.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            size = f"more than {MAX_LINE >> 20} MiB"
            raise UserError(f"{path}: line {number} has {size}; JSON lines have a record a line")
        yield line


def _parquet_rows(stream: IO[bytes], path: str, reading: Reading) -> Iterator[dict | Exception]:
    import pyarrow
    import pyarrow.parquet

    try:
        # Columns are read bit by bit: a file may be a single group of rows, of gigabytes.
        bit_by_bit = {"pre_buffer": False, "buffer_size": BLOCK}
        with pyarrow.parquet.ParquetFile(stream, **bit_by_bit) as file:
            names = file.schema_arrow.names
            if reading.text_key not in names:
                raise UserError(
                    f"{path}: no column {reading.text_key!r}; its columns are "
                    f"{clipped(', '.join(names), 500)} (choose with --text-key)"
                )
            wanted = (reading.text_key, reading.set_key.partition(".")[0])
            columns = [column for column in names if column in wanted]
            for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=columns):
                yield from _rows(batch)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # of a column's name
        if getattr(error, "errno", None):  # the disk's; the library's own for a page has none
            raise
        raise UserError(f"{path}: broken parquet file ({_one_line(str(error))})") from None


def _rows(batch) -> Iterator[dict | Exception]:
    # An error stands in the place of a row with a value that Python cannot hold, such as text that
    # is not UTF-8, or a time after the year 9999.
    errors = (ValueError, OverflowError)
    try:
        yield from batch.to_pylist()
    except errors:
        for index in range(batch.num_rows):
            try:
                yield batch.slice(index, 1).to_pylist()[0]
            except errors as error:
                yield error


def _parse_row(row: dict | Exception, where: str, reading: Reading) -> Record | Malformed:
    if isinstance(row, UnicodeDecodeError):
        return Malformed(where, _not_utf8(row))
    if isinstance(row, Exception):
        return Malformed(where, _one_line(f"not readable ({row})"))
    return _document_of(row, where, reading)
