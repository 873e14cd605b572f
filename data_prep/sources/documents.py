"""Read documents from files: plain text and JSON lines, both also compressed, and parquet.

A line or row without a document is returned as `Malformed`, for the caller to count. Problems of a
whole file (cut short, damaged, without the column) raise `UserError`.
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
# A file without line ends, such as a large JSON array, must not be read into memory completely.
MAX_LINE = 1 << 29
MAX_DOCUMENT = 1 << 26  # characters; encoding needs about 70 bytes of memory for each
SHOWN = 40  # characters of a too large document in messages
MAX_WINDOW = 1 << 31  # the window of `zstd --ultra --long=31`; the library's default is 2^27
# Compressed bytes per call: zstd packs up to 128 KiB into 4 bytes, so they expand to 32 MiB.
PIECE = 1024
PLAIN = (".txt", ".md")
LINES = (".jsonl", ".ndjson")
# Bytes of text per byte of a file, for the estimate of disk space only.
PACKED = {".gz": 3.5, ".zst": 3.5, ".zstd": 3.5, ".bz2": 4.5, ".xz": 4.5}
TEXT_PER_FILE_BYTE = {
    **dict.fromkeys((*PLAIN, *LINES), 1.0),
    # A plain .json is one value; compressed ones, such as C4's, are JSON lines.
    **{kind + end: PACKED[end] for kind in (*PLAIN, *LINES, ".json") for end in PACKED},
    ".parquet": 1.75,  # compressed by snappy, as `datasets` writes it
}
KNOWN_KINDS = (
    f"{', '.join((*PLAIN, *LINES))}, each also with {', '.join(PACKED)}; JSON lines as .json.gz "
    "and so on; .parquet"
)
COMPRESSED = (*PACKED, ".parquet")  # Files of these kinds are never empty.
PARQUET_ROWS = 16  # rows that are unpacked together


@dataclass(frozen=True)
class Document:
    """A text, the name of its set, and its split if the source decides it."""

    text: str
    set: str
    split: str | None = None


@dataclass(frozen=True)
class Malformed:
    """A line or row without a document: its place ("NAME:LINE" or "NAME: row N") and the reason.

    NAME is the file's name within the source, which is equal on every machine.
    """

    where: str
    reason: str


@dataclass(frozen=True)
class Reading:
    """The rules for reading documents from files.

    Attributes:
        text_key: the key of the text in JSON lines and parquet.
        separator: the text between documents in plain text; None: a file is one document.
        set_key: the key of the set's name, with dots into nested objects, such as SlimPajama's
            "meta.redpajama_set_name".
    """

    text_key: str = TEXT_KEY
    separator: str | None = None
    set_key: str = SET_KEY


Record = tuple[str, dict]


def suffix_of(path: PurePath | str) -> str | None:
    """Return the known suffix of a file name, or None."""
    name = PurePath(path).name.lower()
    return next((suffix for suffix in TEXT_PER_FILE_BYTE if name.endswith(suffix)), None)


def is_plain(path: PurePath | str) -> bool:
    """Return True for plain text, compressed or not, which without a separator is one document."""
    return (suffix_of(path) or "").startswith(PLAIN)


def read_file(path: Path, name: str, size: int, reading: Reading) -> Iterator[Record | Malformed]:
    """Yield the documents of a local file in order, as `read_records` does.

    Raises:
        UserError: the file does not have `size` bytes or is changed while it is read, so that the
            manifest's description of the input would be wrong.
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
        # Libraries also raise OSError, without a number and with texts of several lines.
        reason = describe_os_error(error) if error.errno else _one_line(str(error))
        raise file_error(f"{path}: cannot be read ({reason})", error) from None


def read_records(
    stream: IO[bytes], path: str, name: str, reading: Reading
) -> Iterator[Record | Malformed]:
    """Yield (text, record) for each document of an open file; the record is {} for plain text.

    Args:
        path: the file's path, whose suffix decides its type.
        name: the file's name in `Malformed`.

    Raises:
        UserError: the file is damaged, or has no column of the text.
    """
    suffix = suffix_of(path)
    if suffix == ".parquet":
        for number, row in enumerate(_read_parquet_rows(stream, path, reading), 1):
            yield _parse_row(row, f"{name}: row {number}", reading)
        return
    unpacked = io.BufferedReader(_Stream(_decompressed_blocks(stream, path, suffix)), BLOCK)
    if is_plain(path):
        yield from _read_text(_decode_blocks(unpacked, path), name, reading.separator)
        return
    for number, line in enumerate(_read_lines(unpacked, path), 1):
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
    """Yield the documents of a text, which may be larger than memory; a document may not."""
    held: list[str] = []  # earlier pieces of a document; `text` may end within a separator
    text, begin = "", None  # `begin` is the beginning of a document that is too large.
    for piece in pieces:
        *texts, text = (text + piece).split(separator) if separator else [text + piece]
        for whole in texts:
            yield _finish_document(name, "".join((*held, whole)), begin)
            held, begin = [], None
        cut = max(0, len(text) - len(separator or " ") + 1)
        held.append(text[:cut])
        text = text[cut:]
        if sum(map(len, held)) > MAX_DOCUMENT:
            begin = "".join(held)[:SHOWN] if begin is None else begin
            if separator is None:
                break  # Do not read the rest, which may be hundreds of gigabytes.
            held = []
    yield _finish_document(name, "".join((*held, text)), begin)


def _finish_document(name: str, text: str, begin: str | None) -> Record | Malformed:
    if begin is not None or len(text) > MAX_DOCUMENT:
        return _too_large(name, begin or text)
    return text, {}


def _decode_blocks(stream: io.BufferedReader, path: str) -> Iterator[str]:
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


def _decompressed_blocks(stream: IO[bytes], path: str, suffix: str) -> Iterator[bytes]:
    # Blocks have 1 to `BLOCK` bytes.
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
            yield from _decompress(stream, kind)
        if not stream.tell():  # The libraries accept an empty file as an empty text.
            raise EOFError("it is empty")
    except errors as error:
        if getattr(error, "errno", None):  # Errors of the disk have a number, the libraries' none.
            raise
        kind = {"gz": "gzip", "zst": "zstd"}.get(kind, kind)
        raise UserError(f"{path}: broken {kind} file ({_one_line(str(error))})") from None


def _decompress(stream: IO[bytes], kind: str) -> Iterator[bytes]:
    """Yield the text of all frames of a zstd, bz2 or xz file, in blocks of at most `BLOCK`.

    A few kB may expand to gigabytes, so that each call gets few bytes or returns few. Unlike in the
    libraries' file readers, an incomplete frame and garbage after the last frame are errors.
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
        self._decompressed_blocks = blocks
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        data = self._left or memoryview(next(self._decompressed_blocks, b""))
        count = min(len(data), len(buffer))
        buffer[:count] = data[:count]
        self._left = data[count:]
        return count


def _read_lines(stream: io.BufferedReader, path: str) -> Iterator[bytes]:
    number = 0
    while line := stream.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            size = f"more than {MAX_LINE >> 20} MiB"
            raise UserError(f"{path}: line {number} has {size}; JSON lines have a record a line")
        yield line


def _read_parquet_rows(
    stream: IO[bytes], path: str, reading: Reading
) -> Iterator[dict | Exception]:
    import pyarrow
    import pyarrow.parquet

    try:
        # Read columns in small buffers, because a file may be one row group of gigabytes.
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
                yield from _read_rows(batch)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        # UnicodeDecodeError: a column's name is not UTF-8.
        if getattr(error, "errno", None):  # Errors of the disk have a number.
            raise
        raise UserError(f"{path}: broken parquet file ({_one_line(str(error))})") from None


def _read_rows(batch) -> Iterator[dict | Exception]:
    # Yield the error instead of a row with a value that Python cannot represent, such as text that
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
