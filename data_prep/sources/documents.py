"""Reading documents out of files: plain text and JSON lines, both also packed, and parquet.

A line or row that is no document comes out as `Malformed` in its place, for the caller to count.
What is wrong with a file as a whole (cut short, damaged, without the column) raises `UserError`.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import itertools
import json
import lzma
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import IO

from cat_lm.core.errors import UserError, describe_os_error, file_error
from cat_lm.core.readers import clipped

BLOCK = 1 << 20
# A file without line ends, such as one large JSON array, must not be read into memory as a whole.
MAX_LINE = 1 << 29
MAX_DOCUMENT = 1 << 26  # characters; encoding takes some 70 bytes of memory for each
SHOWN = 40  # characters of one that is too large
# A packed file of some kB may hold billions of empty or broken records, which would take hours.
MOST_RECORDS, RECORDS_PER_BYTE = 1_000_000, 16
MAX_WINDOW = 1 << 31  # what `zstd --ultra --long=31` makes; the library's default is 2^27
# Of a packed file, unpacked in one call: zstd packs 128 KiB into 4 bytes, so 32 MiB at most.
PIECE = 1024
PLAIN = (".txt", ".md")
LINES = (".jsonl", ".ndjson")
# How much text a byte of such a file holds, for the estimate of disk space only.
PACKED = {".gz": 3.5, ".zst": 3.5, ".bz2": 4.5, ".xz": 4.5}
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
_NOT_BLANK = re.compile(rb"\S")
# A string of JSON; one that does not end reaches to the end, so that a search never goes back.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
COMPRESSED = (*PACKED, ".parquet")  # of these no file has no bytes
# Rows are unpacked in batches of so many, and of so many bytes: a dictionary repeats large values.
PARQUET_ROWS, PARQUET_BYTES = 16, 1 << 30


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

    text_key: str = "text"
    separator: str | None = None
    set_key: str = "meta.redpajama_set_name"


Record = tuple[str, dict]


def suffix_of(path: PurePath | str) -> str | None:
    """The known suffix that the file's name ends with, or None."""
    name = PurePath(path).name.lower()
    return next((suffix for suffix in TEXT_PER_FILE_BYTE if name.endswith(suffix)), None)


def is_plain(path: PurePath | str) -> bool:
    """Return True if the file is plain text, packed or not: without a separator one document."""
    return (suffix_of(path) or "").startswith(PLAIN)


def read_file(path: Path, name: str, size: int, reading: Reading) -> Iterator[Record | Malformed]:
    """The documents of a file on disk in order, as `read_records` gives them.

    Raises `UserError` too where it has not `size` bytes, or is written to while it is read: what
    the manifest says of the input would not be true.
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
    """The documents of an open file in order: each one's text, and its record ({} in plain text).

    `path` tells the kind of the file by its suffix. Raises `UserError` that names `path` for a file
    that is damaged, lacks the text's column or holds more records than text packs into its bytes;
    `name` says where a `Malformed` is.
    """
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    most = MOST_RECORDS + RECORDS_PER_BYTE * size
    for number, record in enumerate(_records(stream, path, name, reading)):
        if number == most:
            raise UserError(f"{path}: more than {most:,} records in {size:,} bytes are no text")
        yield record


def _records(
    stream: IO[bytes], path: str, name: str, reading: Reading
) -> Iterator[Record | Malformed]:
    suffix = suffix_of(path)
    if is_plain(path):
        yield from _read_text(_blocks(stream, path, suffix), path, name, reading)
    elif suffix == ".parquet":
        for number, row in enumerate(_parquet_rows(stream, path, reading), 1):
            yield _parse_row(row, f"{name}: row {number}", reading)
    else:
        for number, line in _lines(_blocks(stream, path, suffix)):
            yield _parse_line(line, f"{name}:{number}", reading)


def record_of(record: object, where: str, reading: Reading) -> Record | Malformed:
    """A JSON value or a row as a document: its text and itself."""
    if not isinstance(record, dict):
        return Malformed(where, f"a JSON object is needed, not {type(record).__name__}")
    text = record.get(reading.text_key)
    if not isinstance(text, str):
        reason = f"no text under the key {reading.text_key!r}"
        if reading.text_key in record:
            kind = "null" if text is None else type(text).__name__
            return Malformed(where, _one_line(f"{reason} but {kind}"))
        keys = ", ".join(map(str, list(record)[:20])) or "none"
        return Malformed(
            where, _one_line(f"{reason}; its keys are {keys} (choose with --text-key)")
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return Malformed(where, f"half a surrogate pair at {error.start}, not valid Unicode text")
    return text, record


def _parse_line(line: bytes | None, where: str, reading: Reading) -> Record | Malformed:
    if line is None:
        return Malformed(where, f"a line of more than {MAX_LINE >> 20} MiB")
    if len(line) > MAX_DOCUMENT:
        # Numbers and lists take some thirty times their length of memory, strings their own.
        strings = sum(found.end() - found.start() for found in _STRING.finditer(line))
        if len(line) - strings > MAX_DOCUMENT:
            return Malformed(where, f"more than {MAX_DOCUMENT >> 20} MiB of JSON beside strings")
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Malformed(where, _not_utf8(error))
    except (ValueError, RecursionError) as error:
        return Malformed(where, _one_line(f"not a JSON line ({error})"))
    return record_of(record, where, reading)


def _not_utf8(error: UnicodeDecodeError, before: int = 0) -> str:
    return f"not UTF-8 (byte {error.object[error.start]:#04x} at {before + error.start})"


def _one_line(text: str) -> str:
    return clipped(" ".join(text.split()), 500)


def _read_text(
    blocks: Iterable[bytes], path: str, name: str, reading: Reading
) -> Iterator[Record | Malformed]:
    """The documents of a text; its file may be larger than memory, no document may be."""
    separator, document, end = reading.separator, _Growing(name), ""
    for piece in _decoded(blocks, path):
        *texts, rest = (end + piece).split(separator) if separator else [piece]
        for text in texts:
            yield document.ended(text)
        # The next piece may complete a separator that its last characters begin.
        settled = max(0, len(rest) - len(separator) + 1) if separator else len(rest)
        document.add(rest[:settled])
        end = rest[settled:]
        if separator is None and document.is_too_large:
            break  # which the rest of the file, perhaps hundreds of gigabytes, does not mend
    yield document.ended(end)


class _Growing:
    """A document that comes in pieces; of one that is too large the beginning alone is held."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pieces: list[str] = []
        self._size = 0

    @property
    def is_too_large(self) -> bool:
        return self._size > MAX_DOCUMENT

    def add(self, piece: str) -> None:
        self._pieces.append(piece)
        self._size += len(piece)
        if self.is_too_large:
            self._pieces = ["".join(self._pieces)[:SHOWN]]

    def ended(self, piece: str) -> Record | Malformed:
        """Return what there is with the last piece; the next document begins."""
        if not self._size and len(piece) <= MAX_DOCUMENT:
            return piece, {}  # nearly all, where documents are small
        self.add(piece)
        text, is_too_large = "".join(self._pieces), self.is_too_large
        self._pieces, self._size = [], 0
        return too_large(self._name, text) if is_too_large else (text, {})


def _decoded(blocks: Iterable[bytes], path: str) -> Iterator[str]:
    """The characters of a UTF-8 file without its byte order mark, a block at a time."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = 0
    for block in itertools.chain(blocks, [b""]):
        data = block if read else block.removeprefix(codecs.BOM_UTF8)
        first = read + len(block) - len(data) - len(decoder.getstate()[0])
        try:
            yield decoder.decode(data, final=not block)
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: {_not_utf8(error, first)}; convert it first") from None
        read += len(block)


def too_large(where: str, begin: str) -> Malformed:
    """The complaint about a document that cannot be encoded in one piece; it begins so."""
    return Malformed(
        where,
        f"a document of more than {MAX_DOCUMENT / 1e6:.0f} million characters (it begins "
        f"{begin[:SHOWN]!r}) is too large to encode; cut a text file into documents with "
        "--document-separator",
    )


def _blocks(stream: IO[bytes], path: str, suffix: str) -> Iterator[bytes]:
    """Yield a file's bytes, unpacked, in blocks of at most `BLOCK` that are not empty."""
    kind = suffix.rpartition(".")[2]
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
        elif frame is None and kind == "xz":
            frame = lzma.LZMADecompressor(lzma.FORMAT_XZ, MAX_WINDOW)
        elif frame is None:
            frame = bz2.BZ2Decompressor()
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


def _lines(blocks: Iterator[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Yield the numbers and contents of a stream's lines that are not blank.

    None stands in the place of one that is longer than `MAX_LINE`.
    """
    rest: list[bytes] = []
    size = number = 0
    for block in blocks:
        if b"\n" not in block:
            size += len(block)
            rest.append(block)
            if size > MAX_LINE:
                rest.clear()
            continue
        head, _, block = block.partition(b"\n")
        line = None if size + len(head) > MAX_LINE else b"".join([*rest, head])
        rest, size = [], 0  # before the line is used: it may be large
        number += 1
        if line is None or line.strip():
            yield number, line
        lines = io.BytesIO(block)
        for line in lines:
            if not line.endswith(b"\n"):
                rest, size = [line], len(line)
                break
            number += 1
            if not line.isspace():
                yield number, line
                continue
            # Some kB may hold millions of blank lines: those that follow are skipped at once.
            begin, text = lines.tell(), _NOT_BLANK.search(block, lines.tell())
            end = block.rfind(b"\n", 0, text.start() if text else None) + 1
            number += block.count(b"\n", begin, end)
            lines.seek(end)
    line = None if size > MAX_LINE else b"".join(rest)
    if line is None or line.strip():
        yield number + 1, line


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
            groups = map(file.metadata.row_group, range(file.num_row_groups))
            largest = max((group.total_byte_size for group in groups), default=1)
            rows = min(PARQUET_ROWS, max(1, PARQUET_BYTES // max(1, largest)))
            for batch in file.iter_batches(batch_size=rows, columns=columns):
                yield from _rows(batch)
    except (pyarrow.ArrowException, OSError) as error:
        if getattr(error, "errno", None):  # the disk's; the library's own for a page has none
            raise
        raise UserError(f"{path}: broken parquet file ({_one_line(str(error))})") from None


def _rows(batch) -> Iterator[dict | Exception]:
    """The rows of a batch; the error in the place of one with a value that Python cannot hold.

    Such as text that is not UTF-8, or a time after the year 9999.
    """
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError):
        for index in range(batch.num_rows):
            try:
                yield batch.slice(index, 1).to_pylist()[0]
            except (ValueError, OverflowError) as error:
                yield error
    else:
        yield from rows


def _parse_row(row: dict | Exception, where: str, reading: Reading) -> Record | Malformed:
    if isinstance(row, UnicodeDecodeError):
        return Malformed(where, _not_utf8(row))
    if isinstance(row, Exception):
        return Malformed(where, _one_line(f"not readable ({row})"))
    return record_of(row, where, reading)
