"""The rooms' README.md say what is: commands, options, files."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import sys

import pytest

from tests.conftest import REPOSITORY

ROOM = REPOSITORY / "eval"
READMES = [ROOM / "README.md", *sorted(ROOM.glob("*/README.md"))]
# It has more to say, and tests of its own.
READMES.remove(ROOM / "recall" / "README.md")
COMMANDS = {"bash eval/small_study.sh": "eval.small_study"}


def commands(text: str) -> list[tuple[str, list[str]]]:
    """(module, arguments) of every line of a block of code."""
    found = []
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            for start, module in COMMANDS.items():
                line = line.replace(start, f"python -m {module}")
            before, module, rest = line.partition(" -m ")
            assert module and before.split()[0] in ("python", "torchrun"), line
            words = shlex.split(rest)
            found.append((words[0], words[1:]))
    return found


class Parsed(Exception):
    """The command has read its arguments."""


def parse(module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a command read its arguments, and no more. Raises SystemExit where they are wrong."""
    real = argparse.ArgumentParser.parse_args

    def parse_args(self, *given):
        real(self, *given)
        raise Parsed

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        patch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(Parsed):
            main_of(module)()


def main_of(module: str):
    found = importlib.import_module(module)
    return getattr(found, "main", None) or importlib.import_module(f"{module}.__main__").main


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.parent.name)
def test_its_commands_are_taken(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for module, arguments in commands(path.read_text(encoding="utf-8")):
        parse(module, arguments, monkeypatch)


def test_a_wrong_command_would_be_noticed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    wrong = "```bash\npython -m eval.report runs/mine --out runs/report --outt x\n```\n"
    ((module, arguments),) = commands(wrong)
    with pytest.raises(SystemExit):
        parse(module, arguments, monkeypatch)
    assert "--outt" in capsys.readouterr().err


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.parent.name)
def test_its_links_modules_and_sources_are_there(path):
    text = path.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (path.parent / link).exists(), link
    for module in re.findall(r"python -m ((?:eval|launch|cat_lm)[\w.]*)", text):
        assert callable(main_of(module)), module
    for name in re.findall(r"`([\w/]+\.(?:py|sh|yaml)|templates/|common/|records/)`", text):
        assert (path.parent / name).exists() or (REPOSITORY / name).exists(), name


def test_every_room_that_is_a_command_has_one():
    rooms = {path.parent for path in ROOM.glob("*/__main__.py")}
    assert rooms == {path.parent for path in ROOM.glob("*/README.md")}


def test_the_front_one_names_every_command():
    text = (ROOM / "README.md").read_text(encoding="utf-8")
    names = {path.parent.name for path in ROOM.glob("*/__main__.py")}
    names |= {
        path.stem for path in ROOM.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")
    }
    assert names == {name for name in names if f"eval.{name}" in text}
