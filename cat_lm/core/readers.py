"""Readers of JSON, YAML and text files, which check the content against a schema.

Errors are `UserError`s that name the file, the place in it, the value and what is expected.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from cat_lm.core.errors import UserError, describe_os_error, file_error

MAX_TEXT_BYTES = 2**30
MAX_YAML_BYTES = 2**24

T = TypeVar("T", bound=BaseModel)


class Record(BaseModel):
    """The base of schemas of our JSON files: types are exact, and unknown keys are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", protected_namespaces=())


class Versioned(Record):
    """The base of schemas with a format number; files of another format are refused.

    `format` is raised when a reader of the previous format would misread the file.
    """

    format: Literal[1]


def _check_inside(name: str) -> str:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\0" in name or str(path) != name:
        raise ValueError("must be a path inside the file's own folder, such as model/config.json")
    return name


# A path in a file, relative to the file's folder and inside of it.
InsideName = Annotated[str, AfterValidator(_check_inside)]


def resolve(path: Path | str) -> Path:
    """Return an absolute path without links."""
    return Path(os.path.realpath(path))


def read_bytes(path: Path | str, what: str = "", limit: int = MAX_TEXT_BYTES) -> bytes:
    """Read a whole file. Raises UserError if it cannot be read, or is larger than `limit` bytes.

    `what` is a word before the path in errors, such as "site file".
    """
    name = f"{what} {path}".strip()
    try:
        with open(path, "rb") as stream:
            text = stream.read(limit + 1)
    except OSError as error:
        raise file_error(f"{name}: {describe_os_error(error)}", error) from None
    except ValueError as error:  # The path has a zero byte in it.
        raise UserError(f"{name!r}: {error}") from None
    if len(text) > limit:
        raise UserError(f"{name}: is larger than {limit >> 20} MiB; it cannot be what is meant")
    return text


def read_text(path: Path | str, what: str = "", limit: int = MAX_TEXT_BYTES) -> str:
    """Read a UTF-8 text file; errors as in `read_bytes`, and for bytes that are not UTF-8."""
    return decode(read_bytes(path, what, limit), f"{what} {path}".strip())


def decode(text: bytes, name: str) -> str:
    """Decode UTF-8. Raises UserError that begins with `name`."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: is not UTF-8 text (byte {error.start})") from None


def read_json(path: Path | str, schema: type[T], advice: str = "") -> T:
    """Read a JSON file and check it against a schema.

    Raises UserError as `read_bytes` does, and for a mismatch; `advice` ends the message.
    """
    return _checked(schema.model_validate_json, read_bytes(path), str(path), advice)


def check_shape(values: Any, schema: type[T], name: str, advice: str = "") -> T:
    """Check parsed values against a schema, as `read_json` does; errors begin with `name`."""
    return _checked(schema.model_validate, values, name, advice)


def _checked(validate: Callable[[Any], T], given: Any, name: str, advice: str) -> T:
    try:
        return validate(given)
    except ValidationError as error:
        advice = f"; {advice}" if advice else ""
        raise UserError(f"{name}: {_describe_mismatch(error)}{advice}") from None


def _describe_mismatch(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place, kind = ".".join(map(str, first["loc"])), first["type"]
    if kind == "json_invalid":
        return f"is not JSON ({first['ctx']['error']})"
    if place == "format":
        found = "has no format" if kind == "missing" else f"format is {short(first['input'])}"
        return f"{found}, must be 1: another version of cat_lm wrote it"
    if kind == "missing":
        return f"has no {place}"
    # pydantic's own message for these errors names Python types or classes.
    is_object = kind in ("model_type", "dict_type")
    message = "should be an object" if is_object else mismatch_text(first)
    return f"{f'{place} is' if place else 'holds'} {short(first['input'])}: {message}"


def mismatch_text(error: Any) -> str:
    """Return the message of one of pydantic's errors, as a clause that follows the value."""
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return message[0].lower() + message[1:]


def short(value: Any, most: int = 60) -> str:
    """Return a value as JSON text of at most `most` characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return clipped(text, most)


def clipped(text: str, most: int = 60) -> str:
    """Return a text on one line of about `most` characters, with control characters escaped."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


def read_object(
    path: Path | str, advice: str = "", *, finite: bool = False, limit: int = MAX_TEXT_BYTES
) -> dict[str, Any]:
    """Read a JSON file that holds an object with any keys.

    Raises UserError as `read_bytes` and `parse_value` do; `advice` ends the message for another
    value.
    """
    values = parse_value(read_bytes(path, limit=limit), str(path), finite=finite)
    if not isinstance(values, dict):
        advice = f"; {advice}" if advice else ""
        raise UserError(f"{path}: holds {short(values)}, must be an object{advice}")
    return values


def parse_value(text: bytes, name: str, *, finite: bool = False) -> Any:
    """Parse any JSON value. Raises UserError where the text is not JSON.

    `finite` refuses NaN and infinities, which Python writes although JSON has no such values.
    """
    hooks = {"parse_constant": _finite_float, "parse_float": _finite_float} if finite else {}
    try:
        return json.loads(decode(text, name), **hooks)
    except ValueError as error:
        raise UserError(f"{name}: is not JSON ({error})") from None
    except RecursionError:
        raise UserError(f"{name}: is nested too deeply") from None


def _finite_float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is no number of JSON")
    return value


def read_json_lines(
    path: Path | str,
    check: Callable[[Any, str], None],
    *,
    what: str = "",
    cut_tail: bool = False,
) -> list[dict[str, Any]]:
    """Read a file with one JSON object per line; blank lines are skipped.

    Args:
        check: called with each object and its place ("FILE, line 3"); raises UserError.
        what: a word before the path in errors.
        cut_tail: ignore an incomplete last line, which a killed process has left.
    """
    # str.splitlines would also split at characters that JSON strings may contain.
    lines = read_text(path, what).removesuffix("\n").split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{what} {path}, line {number}".strip()
        try:
            record = parse_value(line.encode(), place, finite=True)
        except UserError:
            if cut_tail and number == len(lines):
                break
            raise
        if not isinstance(record, dict):
            raise UserError(f"{place}: holds {short(record)}, must be an object")
        check(record, place)
        records.append(record)
    return records


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader, which refuses duplicate keys and keys that are not text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            place = f"line {key.start_mark.line + 1}: key '{clipped(str(key.value))}'"
            if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                raise UserError(f"{place} is no text; put it in quotes")
            if key.value in seen:
                raise UserError(f"{place} stands twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, name: str) -> Any:
    """Parse YAML as `yaml.safe_load` does.

    Raises UserError, which begins with `name`, for invalid YAML, duplicate keys and keys that are
    not text.
    """
    try:
        return yaml.load(text, _UniqueKeyLoader)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    # The other classes come from the loader's conversions, for example of dates.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        said = clipped(" ".join(str(error).split()), 300)
        raise UserError(f"{name}: not valid YAML: {said}") from None


def read_yaml(path: Path | str, what: str = "") -> Any:
    """Read a YAML file; errors as in `read_text` and `parse_yaml`."""
    return parse_yaml(read_text(path, what, MAX_YAML_BYTES), f"{what} {path}".strip())
