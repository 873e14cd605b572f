"""The files of results in a run folder, read with a check of all that is used of them.

They are made by other commands, and perhaps edited: what is wrong with one is a line that names the
file, the place in it, and what would be right. The values are returned as they stand in the file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from cat_lm.core import readers
from cat_lm.core.readers import Record, Versioned, check_shape
from cat_lm.data.manifest import parse_manifest

_ADVICE = "make the file again"
_Count = Annotated[int, Field(ge=0)]
_Length = Annotated[int, Field(ge=1)]
_MaybeNumber = float | None


class _Step(Record):
    step: _Count
    tokens: _Count
    loss: _MaybeNumber
    # Not in the first step after a start.
    tokens_per_second: _MaybeNumber = None
    step_seconds: _MaybeNumber = None


class _Validation(Record):
    step: _Count
    tokens: _Count
    val_loss: _MaybeNumber
    val_perplexity: _MaybeNumber
    val_bits_per_byte: _MaybeNumber


class _Bin(Record):
    start: _Count
    stop: _Count
    tokens: _Count
    loss: _MaybeNumber


class _Row(Record):
    """A row of length_sweep.json."""

    label: str
    method: str
    length: _Length
    group_kind: str
    model_sha256: str
    tokens_sha256: str
    tokens: _Length
    groups: _Count
    loss: _MaybeNumber
    perplexity: _MaybeNumber
    bits_per_byte: _MaybeNumber
    standard_error: _MaybeNumber
    training_length: int | None
    document_count: int
    stride: int
    documents: str
    dtype: str
    factor: float
    temperature_scope: str
    positions: list[_Bin]


class _Protocol(Record):
    windows: str


class _Sweep(Versioned):
    text: str
    protocol: _Protocol
    rows: list[_Row]
    command: str


class _TaskKey(Record):
    rows_sha256: str
    definition_sha256: str


class _TaskValues(Record):
    metrics: dict[str, _MaybeNumber]
    stderr: dict[str, _MaybeNumber]
    key: _TaskKey


class _Model(Record):
    sha256: str
    max_length: _Length
    dtype: str


class _Settings(Record):
    limit: int | None


class _ZeroShot(Versioned):
    model: _Model
    settings: _Settings
    tasks: dict[str, _TaskValues]


class _Sample(Record):
    prompt: str
    reference: str
    continuation: str


class _Samples(Versioned):
    samples: list[_Sample]
    max_new_tokens: int
    seed: int
    temperature: float
    top_p: float
    model_sha256: str


class _Export(Versioned):
    parameters: int
    data_fingerprint: str | None = None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the records of a metrics.jsonl; a last line that a kill has cut is left out.

    Raises:
        UserError: a line is no record of a step or of a validation.
    """

    def check(record: dict[str, Any], place: str) -> None:
        check_shape(record, _Validation if "val_loss" in record else _Step, place, _ADVICE)

    return readers.read_json_lines(path, check, cut_tail=True)


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of prepared data; empty where they are no longer there."""
    return parse_manifest(readers.read_bytes(path), str(path)) if path.is_file() else {}


def _reader(schema: type[Record]) -> Callable[[Path], dict[str, Any]]:
    def read(path: Path) -> dict[str, Any]:
        """Read a JSON object of the schema; empty where there is no file. Raises UserError."""
        if not path.is_file():
            return {}
        values = readers.read_object(path, _ADVICE, finite=True)
        check_shape(values, schema, str(path), _ADVICE)
        return values

    return read


read_export = _reader(_Export)
read_sweep = _reader(_Sweep)
read_zero_shot = _reader(_ZeroShot)
read_samples = _reader(_Samples)
