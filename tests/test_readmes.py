"""READMEs, guides, RESULTS.md and notes of records: commands are valid, links lead somewhere."""

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
from tests.readme import GUIDES, READMES

EVAL = REPOSITORY / "eval"
NOTES = sorted((EVAL / "records").glob("*.note.md"))
RESULTS = [REPOSITORY / "RESULTS.md", *NOTES]
COMMANDS = {"python train.py": "python -m train", "lm_eval --": "python -m lm_eval --"}


def name_of(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix().removesuffix("/README.md")


def commands_in_blocks(text: str) -> list[tuple[str, list[str]]]:
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


def commands_in_words(text: str) -> list[tuple[str, list[str]]]:
    """(module, arguments) of every command in the text that has options and nothing left out."""
    codes = (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text))
    found = (re.fullmatch(r"python -m (\S+) (-?\w.*)", code) for code in codes)
    return [(m[1], shlex.split(m[2])) for m in found if m and "--" in m[2]]


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
            real = getattr(argparse.ArgumentParser, way)
            patch.setattr(argparse.ArgumentParser, way, ending(real))
        patch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(Parsed):
            main()


def main_of(module: str):
    found = importlib.import_module(module)
    return getattr(found, "main", None) or importlib.import_module(f"{module}.__main__").main


def sections(text: str) -> set[str]:
    """The names that a heading has in links, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(text: str, file: Path) -> list[str]:
    found = []
    for path, _, section in (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text)):
        if path.startswith("http"):
            continue
        target = file.parent / path if path else file
        there = text if target == file else target.read_text(encoding="utf-8") if section else ""
        if not target.exists() or (section and section not in sections(there)):
            found.append(f"{path}#{section}")
    return found


@pytest.mark.parametrize("path", [*READMES, *GUIDES, *RESULTS], ids=name_of)
def test_commands_are_taken_and_links_lead_somewhere(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = path.read_text(encoding="utf-8")
    assert broken_links(text, path) == []
    found = commands_in_blocks(text)
    if path.name != "README.md":
        found += commands_in_words(text)
    for module, arguments in found:
        parse(module, arguments, monkeypatch)


@pytest.mark.parametrize("path", READMES, ids=name_of)
def test_modules_and_sources_are_there(path):
    text = path.read_text(encoding="utf-8")
    for module in re.findall(r"python -m ((?:eval|launch|cat_lm|data_prep)[\w.]*)", text):
        assert callable(main_of(module)), module
    for name in re.findall(
        r"`([\w/]+\.(?:py|sh)|\w+/[\w/]+\.yaml|templates/|common/|records/)`", text
    ):
        assert (path.parent / name).exists() or (REPOSITORY / name).exists(), name


def test_wrong_links_and_commands_are_noticed(tmp_path, monkeypatch):
    text = (
        "# One, two\n[a](#one-two) [b](#two) [c](RESULTS.md) [d](absent.md) [e](README.md#no)\n"
        "`python -m eval.recall theory\n--outt x`\n"
        "```bash\npython -m eval.report runs/mine --out runs/report --outt x\n```\n"
    )
    assert broken_links(text, RESULTS[0]) == ["#two", "absent.md#", "README.md#no"]
    monkeypatch.chdir(tmp_path)
    for find in (commands_in_words, commands_in_blocks):
        ((module, arguments),) = find(text)
        with pytest.raises(SystemExit):
            parse(module, arguments, monkeypatch)


def test_every_note_has_a_record_and_every_package_with_a_command_a_readme():
    for note in NOTES:
        assert note.with_name(note.name.replace(".note.md", ".json")).is_file(), note.name
    packages = {path.parent for path in EVAL.glob("*/__main__.py")}
    written = {path.parent for path in EVAL.glob("*/README.md")}
    assert packages == written - {EVAL / "records", EVAL / "language"}  # of records and study
    text = (EVAL / "README.md").read_text(encoding="utf-8")
    names = {path.parent.name for path in EVAL.glob("*/__main__.py")}
    is_command = (path for path in EVAL.glob("*.py") if "__main__" in path.read_text("utf-8"))
    names |= {path.stem for path in is_command}
    assert names == {name for name in names if f"eval.{name}" in text}
