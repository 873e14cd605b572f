"""The files of results in a run folder, read with a check of all that is used of them.

They are made by other commands, perhaps of another version, perhaps edited: what is wrong with one
is a line that names the file, the place in it, and what would be right.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cat_lm.errors import UserError

NUMBER, WHOLE, TEXT, LIST, OBJECT = "a number", "a whole number", "a text", "a list", "an object"
MAYBE_NUMBER, MAYBE_WHOLE = "a number or null", "a whole number or null"
_TYPES: dict[str, tuple[type, ...]] = {
    NUMBER: (int, float),
    WHOLE: (int,),
    TEXT: (str,),
    LIST: (list,),
    OBJECT: (dict,),
    MAYBE_NUMBER: (int, float, type(None)),
    MAYBE_WHOLE: (int, type(None)),
}

_ANY_RECORD = {"step": WHOLE, "tokens": WHOLE}
_STEP = {"loss": MAYBE_NUMBER}
_VALIDATION = dict.fromkeys(("val_loss", "val_perplexity", "val_bits_per_byte"), MAYBE_NUMBER)
_SPEEDS = ("tokens_per_second", "step_seconds")  # not in the first step after a start
_ROW = {
    **dict.fromkeys(("label", "method", "group_kind", "model_sha256", "tokens_sha256"), TEXT),
    **dict.fromkeys(("length", "tokens", "groups"), WHOLE),
    **dict.fromkeys(("loss", "perplexity", "bits_per_byte", "standard_error"), MAYBE_NUMBER),
    "training_length": MAYBE_WHOLE,
}
_BIN = {"start": WHOLE, "stop": WHOLE, "tokens": WHOLE, "loss": MAYBE_NUMBER}
_SAMPLES = {"samples": LIST, "max_new_tokens": WHOLE, "seed": WHOLE}
_SAMPLES |= dict.fromkeys(("temperature", "top_p"), NUMBER)
_SAMPLE = dict.fromkeys(("prompt", "reference", "continuation"), TEXT)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; a last line that a kill has cut is left out.

    Raises UserError for a line that is no record of a step or of a validation.
    """
    records = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            if number < len(lines):
                raise UserError(f"{path}, line {number}: is not JSON") from None
            continue
        place = f"{path}, line {number}"
        _check(record, _ANY_RECORD, place)
        _check(record, _VALIDATION if "val_loss" in record else _STEP, place)
        _check(record, {key: MAYBE_NUMBER for key in _SPEEDS if key in record}, place)
        records.append(record)
    return records


def read_sweep(path: Path) -> dict[str, Any]:
    """What eval.length_sweep wrote, empty where there is nothing."""
    values = read_object(path)
    if values is None:
        return {}
    _check(values, {"rows": LIST}, path)
    for number, row in enumerate(values["rows"], 1):
        _check(row, _ROW, f"{path}, row {number}")
        for part in row.get("positions") or []:
            _check(part, _BIN, f"{path}, row {number}, positions")
    _check(values.get("protocol", {}), {}, f"{path}, protocol")
    return values


def read_zero_shot(path: Path) -> dict[str, Any]:
    """What eval.zero_shot wrote, empty where there is nothing."""
    values = read_object(path)
    if values is None:
        return {}
    _check(values, {"tasks": OBJECT}, path)
    for name, task in values["tasks"].items():
        place = f"{path}, task {name}"
        _check(task, {"metrics": OBJECT}, place)
        for part in ("metrics", "stderr"):
            found = task.get(part, {})
            _check(found, {}, f"{place}, {part}")
            _check(found, dict.fromkeys(found, MAYBE_NUMBER), f"{place}, {part}")
    for part in ("model", "settings"):
        _check(values.get(part, {}), {}, f"{path}, {part}")
    limit = values.get("settings", {}).get("limit")
    _check({"limit": limit}, {"limit": MAYBE_WHOLE}, f"{path}, settings")
    return values


def read_samples(path: Path) -> dict[str, Any]:
    """What eval.samples wrote, empty where there is nothing."""
    values = read_object(path)
    if values is None:
        return {}
    _check(values, _SAMPLES, path)
    for number, sample in enumerate(values["samples"], 1):
        _check(sample, _SAMPLE, f"{path}, sample {number}")
    return values


def read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object, None where there is no file. Raises UserError where it holds another thing."""
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: is not JSON: {error}") from None
    _check(values, {}, path)
    return values


def _check(values: Any, fields: Mapping[str, str], place: Path | str) -> None:
    if not isinstance(values, dict):
        raise UserError(f"{place}: is {_short(values)}, must be an object; make the file again")
    for name, kind in fields.items():
        if name not in values:
            raise UserError(f"{place}: has no {name}; make the file again")
        value = values[name]
        # To Python, true and false are whole numbers.
        if isinstance(value, bool) or not isinstance(value, _TYPES[kind]):
            raise UserError(
                f"{place}: {name} is {_short(value)}, must be {kind}; make the file again"
            )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
