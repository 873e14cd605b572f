"""Typed readers: text of another shape is one line that names the place."""

from __future__ import annotations

import argparse
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from cat_lm.core import cli, readers
from cat_lm.core.errors import UserError
from cat_lm.core.numbers import Range


class Example(readers.Record):
    count: int
    path: readers.InsideName = "a"
    names: list[str] = Field(default_factory=list)


def line_of(action, *arguments) -> str:
    with pytest.raises(UserError) as raised:
        action(*arguments)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 5000, "is not JSON"),
        (b"[]", "holds []: should be an object"),
        (b"{}", "has no count"),
        (b'{"count": "1"}', 'count is "1": should be a valid integer'),
        (b'{"count": 1, "names": ["x", null]}', "names.1 is null: should be a valid string"),
        (b'{"count": 1, "path": "/x"}', 'path is "/x": must be a path inside'),
        (b'{"count": 1, "path": "a/../../x"}', "must be a path inside"),
        (b'{"count": ' + b"9" * 5000 + b"}", "is not JSON"),
    ],
)
def test_json_of_another_shape_raises_user_error(text, said, tmp_path):
    file = tmp_path / "example.json"
    file.write_bytes(text)
    line = line_of(readers.read_json, file, Example, "make it again")
    assert line.startswith(f"{file}: ") and said in line and line.endswith("; make it again")


def test_json_of_a_later_version_may_have_other_keys(tmp_path):
    file = tmp_path / "example.json"
    file.write_text('{"count": 3, "path": "model/config.json", "later": 1}')
    assert readers.read_json(file, Example).count == 3


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(values)
def test_any_json_is_taken_or_refused_in_one_short_line(value):
    try:
        readers.check_shape(value, Example, "F")
    except UserError as error:
        assert str(error).startswith("F: ") and len(str(error)) < 300
        assert str(error).isprintable()


@given(values)
def test_any_yaml_is_read_as_it_was_written_or_refused(value):
    try:
        found = readers.parse_yaml(json.dumps({"a": value}), "F")
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert set(found) == {"a"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: !!python/object:os.x 1", "tag"),
        ("a: !!int abc", "not valid YAML"),
        ("a: 2020-99-99", "not valid YAML"),
        ("a: " + "9" * 5000, "not valid YAML"),
        ("a: " + "[" * 400, "not valid YAML"),
        ("1: 2", "line 1: key '1' is no text; put it in quotes"),
        ("a: 1\na: 2", "line 2: key 'a' stands twice"),
        ("a: \x01", "not valid YAML"),
    ],
)
def test_yaml_that_cannot_be_read_raises_user_error(text, said):
    line = line_of(readers.parse_yaml, text, "F")
    assert line.startswith("F: ") and said in line


def test_key_of_a_merged_yaml_object_may_be_replaced():
    read = readers.parse_yaml("a: &x {k: 1, m: 2}\nb: {<<: *x, k: 3}\nc: *x", "F")
    assert read == {"a": {"k": 1, "m": 2}, "b": {"k": 3, "m": 2}, "c": {"k": 1, "m": 2}}


def test_path_without_a_text_file_raises_user_error(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "binary").write_bytes(b"ab\xff")
    for path, said in (
        (tmp_path / "none", "no such file or folder"),
        (tmp_path, "is a folder, not a file"),
        (tmp_path / "loop", "Too many levels of symbolic links"),
        (tmp_path / ("x" * 300), "File name too long"),
        (tmp_path / "binary" / "x", "a part of the path is a file"),
        (tmp_path / "binary", "is not UTF-8 text (byte 2)"),
        ("a\0b", "null byte"),
    ):
        assert said in line_of(readers.read_text, path)
    assert "larger than 0 MiB" in line_of(readers.read_text, tmp_path / "binary", "", 2)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_line_with_a_number_that_json_has_not_raises_user_error(number, tmp_path):
    (tmp_path / "lines").write_text(f'{{"step": 1}}\n{{"loss": {number}}}\n')
    line = line_of(readers.read_json_lines, tmp_path / "lines", lambda *_: None)
    assert "lines, line 2: is not JSON" in line and "is no number of JSON" in line


KINDS = (cli.whole(Range(0, 10_000)), cli.whole_numbers(Range(0, 10_000), "1,2"))


@given(st.text() | st.integers().map(str) | st.floats().map(str))
def test_argument_is_within_its_range_or_refused(text):
    for kind in (*KINDS, cli.number(Range(0, 10_000))):
        try:
            found = kind(text)
        except argparse.ArgumentTypeError as error:
            assert len(str(error)) < 220
        else:
            numbers = found if isinstance(found, tuple) else (found,)
            assert all(0 <= number <= 10_000 for number in numbers)


@pytest.mark.parametrize(("kind", "said"), [(KINDS[0], "'--' must be"), (None, "")])
def test_two_dashes_after_an_equals_sign_are_a_value(kind, said):
    parser = cli.Parser(prog="x")
    parser.add_argument("--number", type=kind)
    if said:
        assert said in line_of(parser.parse_args, ["--number=--"])
    else:
        assert parser.parse_args(["--number=--"]).number == "--"


@given(st.text(max_size=80), st.integers(9, 60))
def test_clipped_text_is_short_and_printable(text, most):
    shown = readers.clipped(text, most)
    assert len(shown) <= most and shown.isprintable()


def test_arguments_are_read_as_people_write_them():
    assert KINDS[0]("1_000") == 1000 and KINDS[0]("0.5K") == 500
    assert KINDS[1]("256,512") == (256, 512)
    assert cli.number(Range(0, 1))("1e-3") == 1e-3
    with pytest.raises(argparse.ArgumentTypeError, match="must be greater than 0"):
        cli.number(Range(0, 1), above=0)("0")
