"""Reading documents out of files: plain text, JSON lines (plain, gzip, zstd) and parquet."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cat_lm.errors import UserError

BLOCK = 1 << 20
# How much text a byte of such a file holds, for the estimate of disk space only.
TEXT_PER_FILE_BYTE = {
    ".txt": 1.0,
    ".md": 1.0,
    ".jsonl": 1.0,
    ".jsonl.gz": 3.5,
    ".jsonl.zst": 3.5,
    ".parquet": 2.5,
}


@dataclass(frozen=True)
class Document:
    """A text, the named set it belongs to, and its split where the source decides it."""

    text: str
    set: str
    split: str | None = None


@dataclass(frozen=True)
class Reading:
    """How files become documents: the key of the text, and what separates documents in a text."""

    text_key: str = "text"
    separator: str | None = None


def suffix_of(path: Path) -> str | None:
    """The known suffix that the file's name ends with, or None."""
    name = path.name.lower()
    return next((suffix for suffix in TEXT_PER_FILE_BYTE if name.endswith(suffix)), None)


def read_records(path: Path, reading: Reading) -> Iterator[tuple[str, dict]]:
    """The documents of a file in order: each one's text, and its record (empty for plain text).

    Raises `UserError` naming the file, and the line or row, for whatever cannot be read.
    """
    suffix = suffix_of(path)
    try:
        if suffix in (".txt", ".md"):
            yield from _read_text(path, reading)
        elif suffix == ".parquet":
            yield from _read_parquet(path, reading)
        else:
            yield from _read_json_lines(path, suffix, reading)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None


def decode(data: bytes, where: str) -> str:
    """UTF-8 bytes as text, a byte order mark taken off."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: not UTF-8 (byte {data[error.start]:#04x} at {error.start}); convert it first"
        ) from None


def _read_text(path: Path, reading: Reading) -> Iterator[tuple[str, dict]]:
    text = decode(path.read_bytes(), str(path))
    parts = [text] if reading.separator is None else text.split(reading.separator)
    for part in parts:
        yield part, {}


def _read_json_lines(path: Path, suffix: str, reading: Reading) -> Iterator[tuple[str, dict]]:
    with open(path, "rb") as stream:
        for number, line in enumerate(_lines(_blocks(path, stream, suffix)), 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                record = json.loads(decode(line, where))
            except ValueError as error:
                raise UserError(f"{where}: not a JSON line ({error})") from None
            if not isinstance(record, dict):
                raise UserError(f"{where}: a JSON object is needed, not {type(record).__name__}")
            yield text_of(record, reading, where), record


def text_of(record: dict, reading: Reading, where: str) -> str:
    """The text of a record. Raises `UserError` where there is none, or it is not valid Unicode."""
    text = record.get(reading.text_key)
    if not isinstance(text, str):
        keys = ", ".join(record) or "none"
        raise UserError(
            f"{where}: no text under the key {reading.text_key!r}; "
            f"its keys are {keys} (choose with --text-key)"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: half a surrogate pair at {error.start}, not valid Unicode text"
        ) from None
    return text


def _blocks(path: Path, stream: IO[bytes], suffix: str) -> Iterator[bytes]:
    if suffix == ".jsonl.zst":
        yield from _zstd_blocks(path, stream)
        return
    source = gzip.GzipFile(fileobj=stream) if suffix == ".jsonl.gz" else stream
    try:
        while block := source.read(BLOCK):
            yield block
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: broken gzip file ({error})") from None


def _zstd_blocks(path: Path, stream: IO[bytes]) -> Iterator[bytes]:
    """All frames of a zstd file; unlike the library's own reader it notices a file cut short."""
    import zstandard

    frame, data = None, b""
    try:
        while data := data or stream.read(BLOCK // 8):
            if frame is None:
                frame = zstandard.ZstdDecompressor().decompressobj()
            if block := frame.decompress(data):
                yield block
            data = b""
            if frame.eof:
                data, frame = frame.unused_data, None
    except zstandard.ZstdError as error:
        raise UserError(f"{path}: broken zstd file ({error})") from None
    if frame is not None:
        raise UserError(f"{path}: broken zstd file (cut short)")


def _lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    rest: list[bytes] = []
    for block in blocks:
        if b"\n" not in block:
            rest.append(block)
            continue
        for line in io.BytesIO(b"".join([*rest, block])):
            if not line.endswith(b"\n"):
                rest = [line]
                break
            yield line
        else:
            rest = []
    if rest:
        yield b"".join(rest)


def _read_parquet(path: Path, reading: Reading) -> Iterator[tuple[str, dict]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if reading.text_key not in names:
                raise UserError(
                    f"{path}: no column {reading.text_key!r}; "
                    f"its columns are {', '.join(names)} (choose with --text-key)"
                )
            columns = [name for name in (reading.text_key, "meta") if name in names]
            row = 0
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for record in batch.to_pylist():
                    row += 1
                    yield text_of(record, reading, f"{path}: row {row}"), record
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{path}: broken parquet file ({reason})") from None
