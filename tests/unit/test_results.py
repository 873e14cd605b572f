"""RESULTS.md and the notes of records: their links lead somewhere, their commands are valid."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.unit.test_readmes import parse

PAGE = REPOSITORY / "RESULTS.md"
NOTES = sorted((REPOSITORY / "eval" / "records").glob("*.note.md"))


def sections(text: str) -> set[str]:
    """The names that a heading has in links, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(text: str, file: Path) -> list[str]:
    found = []
    for path, _, section in (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text)):
        target = file.parent / path if path else file
        there = text if target == file else target.read_text(encoding="utf-8") if section else ""
        if not target.exists() or (section and section not in sections(there)):
            found.append(f"{path}#{section}")
    return found


def commands(text: str) -> list[tuple[str, str]]:
    """(module, arguments) of every command in the text that has options and nothing left out."""
    codes = (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text))
    found = (re.fullmatch(r"python -m (\S+) (-?\w.*)", code) for code in codes)
    return [(match[1], match[2]) for match in found if match and "--" in match[2]]


@pytest.mark.parametrize("file", [PAGE, *NOTES], ids=lambda file: file.name)
def test_its_links_lead_somewhere(file):
    assert broken_links(file.read_text(encoding="utf-8"), file) == []


def test_every_note_has_a_record():
    for note in NOTES:
        assert note.with_name(note.name.replace(".note.md", ".json")).is_file(), note.name


def test_commands_are_accepted(tmp_path, monkeypatch):
    found = [one for file in (PAGE, *NOTES) for one in commands(file.read_text(encoding="utf-8"))]
    assert len(found) > 20
    monkeypatch.chdir(tmp_path)
    for module, arguments in found:
        parse(module, shlex.split(arguments), monkeypatch)


def test_wrong_links_and_commands_are_noticed(tmp_path, monkeypatch):
    text = (
        "# One, two\n[a](#one-two) [b](#two) [c](RESULTS.md) [d](absent.md) [e](README.md#no)\n"
        "`python -m eval.recall theory\n--outt x`"
    )
    assert broken_links(text, PAGE) == ["#two", "absent.md#", "README.md#no"]
    ((module, arguments),) = commands(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        parse(module, shlex.split(arguments), monkeypatch)
