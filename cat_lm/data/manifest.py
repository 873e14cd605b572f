"""The manifest of prepared data, which lists its shards with counts and checksums.

It is checked against one schema when it is read. The functions return the file's dictionary, which
may have further keys for people.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, model_validator

from cat_lm.core.errors import UserError
from cat_lm.core.numbers import VOCABULARY
from cat_lm.core.readers import Record, check_shape, parse_value, read_bytes, short

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")  # the splits that all data have
ALL_SPLITS = (*SPLITS, "test")
PlainName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,199}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Counts(Record):
    documents: Count
    tokens: Count
    bytes: Count


class _Shard(_Counts):
    name: PlainName
    bin_sha256: Digest
    idx_sha256: Digest


class _Split(_Counts):
    shards: list[_Shard]


class _Splits(Record):
    train: _Split
    validation: _Split
    test: _Split | None = None


class _Tokenizer(Record):
    spec: str
    vocab_size: Annotated[int, Field(ge=VOCABULARY.low, le=VOCABULARY.high)]
    eod_id: Count
    sha256: Digest
    eod_token: str | None = None

    @model_validator(mode="after")
    def _eod_is_an_id(self) -> _Tokenizer:
        if self.eod_id >= self.vocab_size:
            raise ValueError(f"eod_id {self.eod_id} must be below vocab_size {self.vocab_size}")
        return self


class _Manifest(Record):
    """The schema of the keys that readers rely on; further keys are for people."""

    format_version: Annotated[int, Field(ge=FORMAT_VERSION, le=FORMAT_VERSION)]
    fingerprint: Digest
    source: dict[str, Any]
    tokenizer: _Tokenizer
    dtype: Literal["uint8", "int8", "int16", "int32", "int64", "uint16"]
    unigram_loss: FiniteFloat
    sources: dict[str, dict[Literal[ALL_SPLITS], _Counts]]
    splits: _Splits
    arguments: dict[str, Any] = Field(default_factory=dict)
    input: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _names_differ(self) -> _Manifest:
        splits = (self.splits.train, self.splits.validation, self.splits.test)
        names = Counter(shard.name for split in splits if split for shard in split.shards)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"the shard {twice[0]} must stand once only")
        return self


def read_manifest(folder: Path | str) -> dict[str, Any]:
    """Read the manifest of a prepared folder.

    Raises UserError if there is none (the folder is missing or its preparation did not finish), and
    for one that is unreadable, of another format version, or does not match the schema.
    """
    path = Path(folder) / MANIFEST
    if not path.exists():
        what = "holds no finished data" if Path(folder).is_dir() else "no such folder"
        raise UserError(f"{folder}: {what} (no {MANIFEST}); run python -m data_prep.prepare")
    return parse_manifest(read_bytes(path), str(path))


def parse_manifest(text: bytes, name: str) -> dict[str, Any]:
    """Parse the text of a manifest; errors, as of `read_manifest`, begin with `name`."""
    values = parse_value(text, name, finite=True)
    if not isinstance(values, dict):
        raise UserError(f"{name}: not a manifest of prepared data (holds {short(values)})")
    check_shape(values, _Manifest, f"{name}: not a manifest of prepared data")
    return values


def listed_shards(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield all shards that a manifest lists, in its order."""
    for split in splits_of(manifest):
        yield from manifest["splits"][split]["shards"]


def splits_of(manifest: dict[str, Any]) -> list[str]:
    """List the splits that a manifest has, in their order."""
    return [split for split in ALL_SPLITS if manifest["splits"].get(split) is not None]


def fingerprint(shards: Iterable[dict], tokenizer_sha256: str) -> str:
    """Return the identity of data: the SHA-256 of the tokenizer's and all shards' checksums."""
    digest = hashlib.sha256(tokenizer_sha256.encode())
    for shard in shards:
        digest.update(f"{shard['name']} {shard['bin_sha256']} {shard['idx_sha256']}\n".encode())
    return digest.hexdigest()


def check_fingerprint(manifest: dict[str, Any], name: str) -> None:
    """Raise UserError unless a manifest's fingerprint is that of its shards and tokenizer.

    Resumed runs, packing plans and caches identify their data by the fingerprint only. The error
    begins with `name`.
    """
    found = fingerprint(listed_shards(manifest), manifest["tokenizer"]["sha256"])
    if found != manifest["fingerprint"]:
        raise UserError(
            f"{name}: the manifest's fingerprint does not belong to its shards; copy the data "
            "again from where they are whole, or prepare them again"
        )
