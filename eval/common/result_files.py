"""Declare the files of results that other commands read again, and read them.

The files are made by other commands, and perhaps edited: what is wrong with one is a line that
names the file, the place in it, and what would be right. Values are returned as they stand in the
file; what readers do not use has a default here.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from cat_lm.core import readers
from cat_lm.core.readers import Record, Versioned, check_shape

EVALUATION = "eval"  # The folder in a run for the results of eval commands.
ZERO_SHOT = "zero_shot"  # The folder in a run where eval.zero_shot writes.
_ADVICE = "make the file again"
Count = Annotated[int, Field(ge=0)]
Length = Annotated[int, Field(ge=1)]
Number = float | None  # None stands for infinities and NaN.


class _Step(Record):
    step: Count
    tokens: Count
    loss: Number
    # The first step after a launch has no speed.
    tokens_per_second: Number = None
    step_seconds: Number = None


class _Validation(Record):
    step: Count
    tokens: Count
    val_loss: Number
    val_perplexity: Number
    val_bits_per_byte: Number


class Bin(Record):
    """The mean loss of tokens that saw `start` to `stop` - 1 tokens."""

    start: Count
    stop: Count
    tokens: Count
    loss: Number


class Scored(Record):
    """A model's score of a text; the lists are only in JSON."""

    perplexity: Number
    loss: Number
    word_perplexity: Number = None
    bits_per_byte: Number
    standard_error: Number
    tokens: Length
    words: Count = 0
    bytes: Count = 0
    groups: Count
    group_kind: str
    document_count: int
    rope_type: str | None = None
    rope_factor: Number = None
    original_length: int | None = None
    attention_factor: Number = None
    attention_temperature: Number = None
    parameters: int = 0
    seconds: float = 0
    positions: list[Bin]
    document_nlls: list[float] | None = None
    document_tokens: list[int] | None = None


class SweepCell(Scored, Versioned):
    """A finished cell of a length sweep."""


class SweepRow(Scored):
    """A row of length_sweep.json: a cell with its display names."""

    label: str
    length: Length
    method: str
    byte_perplexity: Number = None
    stride: int
    documents: str
    skip_tokens: Count = 0
    training_length: int | None
    factor: float
    temperature_scope: str
    model: str = ""
    model_sha256: str
    tokens_sha256: str
    dtype: str
    device: str = ""
    text_tokens: Count = 0


class _Protocol(Record):
    windows: str


class Sweep(Versioned):
    """length_sweep.json."""

    text: str
    protocol: _Protocol
    rows: list[SweepRow]
    command: str


class _TaskKey(Record):
    rows_sha256: str
    definition_sha256: str


class TaskValues(Record):
    """A finished zero-shot task."""

    metrics: dict[str, Number]
    stderr: dict[str, Number]
    version: Any
    n: int
    key: _TaskKey


class _Model(Record):
    sha256: str
    max_length: Length
    dtype: str


class _Settings(Record):
    limit: int | None


class ZeroShot(Versioned):
    """zero_shot.json."""

    model: _Model
    settings: _Settings
    tasks: dict[str, TaskValues]


class _Sample(Record):
    prompt: str
    reference: str
    continuation: str


class Samples(Versioned):
    """samples.json."""

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
    """Read the records of steps and validations of a metrics.jsonl, without those of callbacks.

    A last line that a kill has cut is left out.

    Raises:
        UserError: a line is no record of a step or of a validation.
    """

    def check(record: dict[str, Any], place: str) -> None:
        if not is_of_callback(record):
            check_shape(record, _Validation if "val_loss" in record else _Step, place, _ADVICE)

    def is_of_callback(record: dict[str, Any]) -> bool:
        return any("/" in key for key in record) and not {"loss", "val_loss"} & record.keys()

    records = readers.read_json_lines(path, check, cut_tail=True)
    return [record for record in records if not is_of_callback(record)]


def read_result(path: Path, schema: type[Record], advice: str = _ADVICE) -> dict[str, Any]:
    """Read a JSON object of a schema; empty where there is no file. Raises UserError."""
    if not path.is_file():
        return {}
    values = readers.read_object(path, advice, finite=True)
    check_shape(values, schema, str(path), advice)
    return values


read_export = partial(read_result, schema=_Export)
read_sweep = partial(read_result, schema=Sweep)
