"""The README.md of the project and of its rooms say what is: commands, options, files."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.readme import READMES

ROOM = REPOSITORY / "eval"
COMMANDS = {"python train.py": "python -m train", "lm_eval --": "python -m lm_eval --"}


def name_of(path: Path) -> str:
    return path.parent.relative_to(REPOSITORY).as_posix()


def commands(text: str) -> list[tuple[str, list[str]]]:
    """(module, arguments) of every line of a block of commands but those of our scripts."""
    found = []
    for block in re.findall(r"^```bash(?:-slurm)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            for start, command in COMMANDS.items():
                line = line.replace(start, command)
            if line.startswith("bash "):
                assert (REPOSITORY / line.split()[1]).is_file(), line
                continue
            before, module, rest = line.partition(" -m ")
            assert module and before.split()[0] in ("python", "torchrun"), line
            words = shlex.split(rest)
            found.append((words[0], words[1:]))
    return found


class Parsed(Exception):
    """The command has read its arguments."""


def ending(real: Callable) -> Callable:
    """Make a method that does as `real` does and then raises `Parsed`."""

    def parse_args(self, *given):
        real(self, *given)
        raise Parsed

    return parse_args


def parse(module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a command read its arguments, and no more. Raises SystemExit where they are wrong."""
    if module == "lm_eval":  # not ours, and perhaps not installed
        return
    main = main_of(module)
    if module == "launch.slurm":  # has a way of its own to read them
        importlib.import_module("launch.slurm.__main__").parse_arguments(arguments)
        return
    with monkeypatch.context() as patch:
        for way in ("parse_args", "parse_intermixed_args"):
            patch.setattr(
                argparse.ArgumentParser, way, ending(getattr(argparse.ArgumentParser, way))
            )
        patch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(Parsed):
            main()


def main_of(module: str):
    found = importlib.import_module(module)
    return getattr(found, "main", None) or importlib.import_module(f"{module}.__main__").main


@pytest.mark.parametrize("path", READMES, ids=name_of)
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


@pytest.mark.parametrize("path", READMES, ids=name_of)
def test_its_links_modules_and_sources_are_there(path):
    text = path.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (path.parent / link).exists(), link
    for module in re.findall(r"python -m ((?:eval|launch|cat_lm|data_prep)[\w.]*)", text):
        assert callable(main_of(module)), module
    for name in re.findall(
        r"`([\w/]+\.(?:py|sh)|\w+/[\w/]+\.yaml|templates/|common/|records/)`", text
    ):
        assert (path.parent / name).exists() or (REPOSITORY / name).exists(), name


def test_every_room_that_is_a_command_has_one():
    rooms = {path.parent for path in ROOM.glob("*/__main__.py")}
    written = {path.parent for path in ROOM.glob("*/README.md")}
    written -= {ROOM / "records", ROOM / "language"}  # of `eval.records` and `eval.study`
    assert rooms == written


def test_the_front_one_names_every_command():
    text = (ROOM / "README.md").read_text(encoding="utf-8")
    names = {path.parent.name for path in ROOM.glob("*/__main__.py")}
    names |= {
        path.stem for path in ROOM.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")
    }
    assert names == {name for name in names if f"eval.{name}" in text}
