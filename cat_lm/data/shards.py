"""Token shards in the `.bin/.idx` format that Megatron-LM and GPT-NeoX read and write.

`NAME.bin` holds the tokens of all documents, concatenated, little endian. `NAME.idx` holds:

    magic               9 bytes   MMIDIDX 00 00
    version             uint64    1
    dtype code          uint8     1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16
    sequences S         uint64
    document marks D    uint64    S + 1 here: every sequence is one whole document
    lengths             int32[S]  tokens in each sequence
    pointers            int64[S]  byte offset of each sequence in the .bin
    document marks      int64[D]  index of each document's first sequence, closed by S

Tokens are uint16 for vocabularies of fewer than 65,536 ids, and int32 otherwise: the format has no
code for uint32.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from cat_lm.core.errors import UserError
from cat_lm.core.files import atomic_write

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {
    1: np.dtype("uint8"),
    2: np.dtype("int8"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
MAX_DOCUMENT_TOKENS = 2**31 - 1  # lengths are int32


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype on disk for ids below `vocab_size`: uint16, or int32 for more ids."""
    return np.dtype("<u2") if vocab_size < 2**16 else np.dtype("<i4")


def index_bytes(documents: int) -> int:
    """Return the size in bytes of the `.idx` of a shard with this number of documents."""
    return HEADER.size + 4 * documents + 8 * documents + 8 * (documents + 1)


@dataclass(frozen=True)
class ShardInfo:
    """A shard's entry in the manifest: `name` without suffix, counts and checksums."""

    name: str
    documents: int
    tokens: int
    bytes: int
    bin_sha256: str
    idx_sha256: str

    def to_json(self) -> dict:
        return asdict(self)


class Shard:
    """A memory-mapped pair of `.bin` and `.idx`. Opening reads 34 bytes of any shard.

    Attributes: `num_sequences`, `num_documents`, `num_tokens`, `dtype`.
    Raises `UserError` for a missing file, another format, or inconsistent sizes.
    """

    def __init__(self, path: Path | str) -> None:
        path = Path(path)
        self.bin_path = path.with_name(path.name + ".bin")
        self.idx_path = path.with_name(path.name + ".idx")
        for file in (self.bin_path, self.idx_path):
            if not file.is_file():
                raise UserError(f"{file}: no such file, but the shard needs it; prepare it again")
        with open(self.idx_path, "rb") as stream:
            header = stream.read(HEADER.size)
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise UserError(f"{self.idx_path}: not an index of the Megatron format (magic MMIDIDX)")
        _, version, code, self.num_sequences, marks = HEADER.unpack(header)
        if version != VERSION or code not in DTYPES:
            raise UserError(
                f"{self.idx_path}: version {version}, dtype code {code}; "
                f"readable are version {VERSION} and codes {sorted(DTYPES)}"
            )
        self.num_documents = marks - 1
        self.dtype = DTYPES[code]
        size = self.idx_path.stat().st_size
        expected = HEADER.size + 12 * self.num_sequences + 8 * marks
        if size != expected:
            raise UserError(f"{self.idx_path}: {size} bytes, its header asks for {expected}")
        bin_size = self.bin_path.stat().st_size
        if bin_size % self.dtype.itemsize:
            raise UserError(f"{self.bin_path}: {bin_size} bytes, not a whole number of tokens")
        self.num_tokens = bin_size // self.dtype.itemsize

    @cached_property
    def tokens(self) -> np.ndarray:
        """Return all tokens of the shard, [num_tokens], as a read-only memory map."""
        if self._mapping is None:
            return np.empty(0, self.dtype)
        return np.frombuffer(self._mapping, self.dtype)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop) as a view of the memory map; they are read in one request."""
        if self._mapping is not None:
            first = start * self.dtype.itemsize // mmap.PAGESIZE * mmap.PAGESIZE
            size = stop * self.dtype.itemsize - first
            self._mapping.madvise(mmap.MADV_WILLNEED, first, size)
        return self.tokens[start:stop]

    @cached_property
    def _mapping(self) -> mmap.mmap | None:
        if self.num_tokens == 0:  # An empty file cannot be mapped.
            return None
        with open(self.bin_path, "rb") as stream:
            mapping = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        # Windows are read at random positions. The kernel's read-ahead would make a batch of 256
        # from a cold 30 GB corpus take seconds instead of milliseconds.
        mapping.madvise(mmap.MADV_RANDOM)
        return mapping

    @cached_property
    def _index(self) -> mmap.mmap:
        with open(self.idx_path, "rb") as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)

    def forget_index(self) -> None:
        """Unmap the `.idx`, and thereby close its file, until it is needed again."""
        self.__dict__.pop("_index", None)

    @property
    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each sequence, int32 [num_sequences]."""
        return self._part(np.dtype("<i4"), HEADER.size, self.num_sequences)

    @property
    def pointers(self) -> np.ndarray:
        """Return the byte offset of each sequence in the `.bin`, int64 [num_sequences]."""
        return self._part(np.dtype("<i8"), HEADER.size + 4 * self.num_sequences, self.num_sequences)

    @property
    def document_marks(self) -> np.ndarray:
        """Return each document's first sequence, and the end, int64 [documents + 1]."""
        offset = HEADER.size + 12 * self.num_sequences
        return self._part(np.dtype("<i8"), offset, self.num_documents + 1)

    def documents(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the start and end positions of the documents [first, stop), both int64.

        Raises `UserError` for an index that is not consistent with the `.bin`.
        """
        marks = self.document_marks[first : stop + 1]
        begin, last = marks[:-1], marks[1:] - 1
        inside = ((begin >= 0) & (begin <= last) & (last < self.num_sequences)).all()
        if inside:
            starts = self.pointers[begin] // self.dtype.itemsize
            stops = self.pointers[last] // self.dtype.itemsize + self.lengths[last]
            inside = ((starts >= 0) & (starts <= stops) & (stops <= self.num_tokens)).all()
        if not inside:
            raise UserError(
                f"{self.idx_path}: a document of {first} … {stop - 1} does not lie in "
                f"{self.bin_path.name}; the index is damaged"
            )
        return starts, stops

    def _part(self, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
        return np.frombuffer(self._index, dtype, count, offset)


@contextmanager
def _verified_file(path: Path) -> Iterator[tuple[Callable[[bytes], None], Any]]:
    """Yield a function that appends bytes to a new file, and the SHA-256 object of these bytes.

    The file is flushed, read again, compared with the checksum, and then renamed into place.
    Reading again usually reads the page cache: it finds wrong writes, and no later damage by the
    disk.
    """
    digest = hashlib.sha256()
    with atomic_write(path, "w+b") as stream:

        def append(data: bytes) -> None:
            stream.write(data)
            digest.update(data)

        yield append, digest
        stream.flush()
        os.fsync(stream.fileno())
        stream.seek(0)
        if hashlib.file_digest(stream, "sha256").digest() != digest.digest():
            raise UserError(f"{path}: reads back different from what was written; check the disk")


def write_index(path: Path, dtype: np.dtype, lengths: np.ndarray) -> str:
    """Write an `.idx` for documents of these lengths; return its SHA-256."""
    lengths = np.ascontiguousarray(lengths, dtype="<i4")
    ends = np.cumsum(lengths, dtype=np.int64)
    pointers = (ends - lengths) * dtype.itemsize
    with _verified_file(path) as (append, digest):
        append(HEADER.pack(MAGIC, VERSION, CODES[dtype], len(lengths), len(lengths) + 1))
        append(lengths.tobytes())
        append(pointers.astype("<i8").tobytes())
        append(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
    return digest.hexdigest()


class ShardWriter:
    """A context manager that writes documents into the shard `folder/NAME.bin` and `.idx`.

    The `.idx` is written last, so that a shard with an index is complete. After an error there is
    neither. `info` is the entry of the complete shard in the manifest.
    """

    info: ShardInfo

    def __init__(self, folder: Path | str, name: str, dtype: np.dtype) -> None:
        self._folder, self._name, self._dtype = Path(folder), name, np.dtype(dtype)
        self._lengths, self._tokens, self._bytes = [np.empty(0, np.int32)], 0, 0

    def __enter__(self) -> ShardWriter:
        self._file = _verified_file(self._folder / f"{self._name}.bin")
        self._append, self._digest = self._file.__enter__()
        return self

    def write(self, tokens: np.ndarray, lengths: np.ndarray, text_bytes: Iterable[int]) -> None:
        """Append documents: their concatenated tokens, lengths, and sizes in UTF-8 bytes."""
        self._append(np.ascontiguousarray(tokens, dtype=self._dtype).tobytes())
        self._tokens += len(tokens)
        self._lengths.append(np.asarray(lengths, np.int32))
        self._bytes += int(np.sum(np.asarray(text_bytes, dtype=np.int64)))

    def __exit__(self, *error: Any) -> None:
        data, index = (self._folder / f"{self._name}.{suffix}" for suffix in ("bin", "idx"))
        if error[0] is None:
            index.unlink(missing_ok=True)  # An old index must not be combined with new data.
        self._file.__exit__(*error)
        if error[0] is not None:
            return
        lengths = np.concatenate(self._lengths)
        try:
            if self._tokens != (tokens := int(lengths.sum(dtype=np.int64))):
                raise RuntimeError(f"{data}: {self._tokens} tokens, but documents of {tokens}")
            index_sha256 = write_index(index, self._dtype, lengths)
        except BaseException:
            data.unlink()
            raise
        self.info = ShardInfo(
            name=self._name,
            documents=len(lengths),
            tokens=self._tokens,
            bytes=self._bytes,
            bin_sha256=self._digest.hexdigest(),
            idx_sha256=index_sha256,
        )
