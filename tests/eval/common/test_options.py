"""Options of commands that the dataclass declares which is recorded."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from cat_lm.core import numbers
from cat_lm.core.cli import Parser, announce
from cat_lm.core.errors import UserError
from eval.common.options import Option, add_options, check_options, options_of


@dataclass(frozen=True)
class Settings:
    width: Annotated[int, Option("model width", numbers.SMALL_WIDTH)]
    rate: Annotated[float, Option(range=numbers.LEARNING_RATE, above=0)] = 1e-3
    stop: Annotated[float | None, Option(range=numbers.FRACTION, word="none")] = 0.5
    lengths: Annotated[tuple[int, ...], Option(range=numbers.SMALL_CONTEXT)] = ()
    norm: Annotated[Literal["layer", "batch"], Option()] = "layer"
    is_long: Annotated[bool, Option("longer")] = False
    has_bias: Annotated[bool, Option()] = True
    name: str = "no option"

    def __post_init__(self) -> None:
        check_options(self)


def read(*words: str, **how) -> Settings:
    parser = Parser(prog="x")
    add_options(parser, Settings, **how)
    return options_of(parser.parse_args(words), Settings)


def test_text_is_read_by_the_fields_type():
    assert read("--width", "8") == Settings(8)
    words = "--width 1K --rate 0.1 --stop none --lengths 4,8 --norm batch --is-long --no-has-bias"
    assert read(*words.split()) == Settings(1000, 0.1, None, (4, 8), "batch", True, False)
    assert read(defaults={"width": 3}) == Settings(3)
    assert read("--width", "8", without=("rate",)) == Settings(8)


@pytest.mark.parametrize(
    ("variables", "printed"),
    [
        ({}, "a line\n"),
        ({"RANK": "0"}, "a line\n"),
        ({"RANK": "1"}, ""),
        ({"SLURM_PROCID": "3"}, ""),
    ],
)
def test_first_rank_alone_announces(variables, printed, monkeypatch, capsys):
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    announce("torch is imported")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    announce("a line")
    assert capsys.readouterr() == ("", printed)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "the following arguments are required: --width"),
        ("--rate 0.1 --nor layer", "the following arguments are required: --width"),
        ("--rate 0.1 --widht=8", "arguments: --widht=8; did you mean --width\\?"),
        ("--rate 0.1 -- --widht", "the following arguments are required: --width"),
        ("--width 0", "--width: '0' must be from 1 to 16,384"),
        ("--width 8 --rate 0", "must be greater than 0"),
        ("--width 8 --norm none", "invalid choice: 'none'"),
        ("--width 8 --name x", "unrecognized arguments: --name x"),
    ],
)
def test_what_does_not_fit_is_one_line(words, said):
    with pytest.raises(UserError, match=said):
        read(*words.split())


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rate": 0.0}, "rate=0.0: must be greater than 0"),
        ({"lengths": (4, 0)}, "lengths=0: must be from 1 to"),
        ({"norm": "none"}, "norm=none: must be layer or batch"),
        ({"stop": 2.0}, "stop=2.0: must be from 0 to 1"),
    ],
)
def test_values_from_python_have_the_same_ranges(values, said):
    with pytest.raises(UserError, match=said):
        Settings(**{"width": 8, **values})
