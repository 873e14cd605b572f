"""The numbers that commands take: every one has a range, and odd values are one line."""

from __future__ import annotations

import argparse
import ast
import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cat_lm.core import cli, numbers

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [ROOT / "train.py"]
for _folder in ("cat_lm", "data_prep", "eval", "launch"):
    SOURCES += sorted((ROOT / _folder).rglob("*.py"))
COMMANDS = ("train", "launch.doctor.__main__", "launch.slurm.__main__")
COMMANDS += (
    "eval.speed.__main__",
    "eval.recall.__main__",
    "eval.long_range.__main__",
    "eval.study",
)
WRITING = COMMANDS[1:]
WRITING += ("cat_lm.export", "cat_lm.upcycle", "cat_lm.sparsify", "data_prep.prepare")
WRITING += ("data_prep.adopt", "eval.quickstart", "eval.report.__main__")
WRITING += ("eval.landmark.__main__", "eval.length_sweep.__main__", "eval.zero_shot.__main__")
OUTPUTS = ("out", "json", "scratch", "cache", "prefetch")
ODD = ["", " ", "-", "0", "-1", "1", "1e30", str(10**30), str(-(10**19)), "0.5", "nan", "inf"]
ODD += ["-inf", "1e-320", "1e300", "true", "null", "[]", "{}", "a" * 300, "../../x", "/proc/x"]
ODD += ["\U0001f600\x01", "2020-99-99", "²", "1,1", "1,,2", "9" * 5000, "1\n2", "/dev/full"]


def options_of(path: Path) -> Iterator[ast.keyword]:
    """The keywords of every option that a file adds to a parser."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            if called in ("add", "add_argument"):
                yield from node.keywords


def test_no_option_is_a_number_without_a_range():
    """`type=int` and `type=float` take 10^30, NaN and a billion workers."""
    bare = [
        f"{path.relative_to(ROOT)}, line {keyword.value.lineno}: give a kind of cat_lm.core.cli"
        for path in SOURCES
        for keyword in options_of(path)
        if keyword.arg == "type" and getattr(keyword.value, "id", "") in ("int", "float")
    ]
    assert not bare, "\n".join(bare)


class Reached(Exception):
    """The command has made its parser."""


def parser_of(name: str, monkeypatch) -> argparse.ArgumentParser:
    found = []

    def parse(self, *_):
        found.append(self)
        raise Reached

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_intermixed_args", parse)
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(Reached):
        importlib.import_module(name).main()
    return found[0]


def actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from actions(inner)
        else:
            yield action


def plain(value: object) -> bool:
    parts = value if isinstance(value, tuple) else (value,)
    numbers = [part for part in parts if isinstance(part, int | float)]
    return all(math.isfinite(n) and abs(n) <= 1e19 for n in numbers)


@pytest.mark.parametrize("name", COMMANDS)
def test_odd_values_are_taken_or_refused_in_a_line(name, monkeypatch):
    kinds = [a for a in actions(parser_of(name, monkeypatch)) if a.type not in (None, Path)]
    for action in kinds:
        for odd in ODD:
            try:
                assert plain(action.type(odd)), (action.option_strings, odd)
            except argparse.ArgumentTypeError as error:
                assert str(error).isprintable() and len(str(error)) < 300, error


@pytest.mark.parametrize("name", WRITING)
def test_an_output_at_an_address_is_refused(name, monkeypatch):
    outputs = [a for a in actions(parser_of(name, monkeypatch)) if a.dest in OUTPUTS]
    assert outputs
    for action in outputs:
        for address in ("s3://bucket/x", "s3:/x", "./s3://x", "simplecache::gs://x", "me@host:x"):
            with pytest.raises(argparse.ArgumentTypeError, match="is an address"):
                action.type(address)
        for nothing in ("  ", "' '", "-"):
            with pytest.raises(argparse.ArgumentTypeError, match="is no path"):
                action.type(nothing)
        for name in ("12:", "C:/x", "a:b:/x", "a/b://x", "a/me@host:x", "./-"):
            assert action.type(name) == Path(name)


def test_kinds():
    assert cli.whole(numbers.STEPS)(" 1_000 ") == 1000
    assert cli.number(numbers.LEARNING_RATE)("3e-4") == 3e-4
    assert cli.whole_numbers(numbers.RANKS, "1,2")("8, 16") == (8, 16)
    for kind, text, said in (
        (cli.whole(numbers.RANKS), "0", "'0' must be from 1 to 1,048,576"),
        (cli.whole(numbers.RANKS), "1.5", "must be a whole number"),
        (cli.number(numbers.FRACTION, above=0), "0", "must be greater than 0"),
        (cli.number(numbers.FRACTION), "nan", "must be from 0 to 1"),
        (cli.whole_numbers(numbers.RANKS, "1,2", distinct=True), "1,1", "names a number twice"),
    ):
        with pytest.raises(argparse.ArgumentTypeError) as raised:
            kind(text)
        assert said in str(raised.value)


def test_a_result_may_go_where_a_file_can_be_made(tmp_path):
    """Also into folders that are not there yet, and in place of an earlier result."""
    (tmp_path / "old.json").write_text("{}")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("new.json", "old.json", "a/b/new.json", "x" * 255):
        assert cli.output_file(str(tmp_path / name)) == tmp_path / name
    for name, said in (("old.json/x", "is a file"), ("loop", "no regular file")):
        with pytest.raises(argparse.ArgumentTypeError, match=said):
            cli.output_file(str(tmp_path / name))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loop", "old.json"]
