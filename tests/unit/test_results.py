"""RESULTS.md names records that are there, commands that are taken and sections that it has."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.conftest import REPOSITORY
from tests.unit.test_readmes import parse

PAGE = REPOSITORY / "RESULTS.md"
RECORDS = REPOSITORY / "eval" / "records"


def records_named(text: str) -> set[str]:
    """The records that a text says it has its numbers from; where a command would write is none."""
    here = re.sub(r"--json\s+eval/records/\S+", "", text)
    return set(re.findall(r"eval/records/([\w.-]+\.(?:json|png))", here))


def sections(text: str) -> set[str]:
    """The names that a heading has in links, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(text: str) -> list[str]:
    found = []
    for path, _, section in (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text)):
        target = REPOSITORY / path if path else PAGE
        there = text if target == PAGE else target.read_text(encoding="utf-8") if section else ""
        if not target.exists() or (section and section not in sections(there)):
            found.append(f"{path}#{section}")
    return found


def commands(text: str) -> list[tuple[str, str]]:
    """(module, arguments) of every command in the text that has options and nothing left out."""
    codes = (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text))
    found = (re.fullmatch(r"(?:[A-Z_]+=\S+ )*python -m (\S+) (-?\w.*)", code) for code in codes)
    return [
        (match[1], match[2])
        for match in found
        if match and "--" in match[2] and not re.search(r"…|\|| [A-Z](?: |$)", match[2])
    ]


def test_its_records_are_there_and_all_are_named():
    text = PAGE.read_text(encoding="utf-8")
    assert sorted(name for name in records_named(text) if not (RECORDS / name).is_file()) == []
    unnamed = [path.name for path in RECORDS.glob("*.json") if path.stem not in text]
    assert sorted(unnamed) == []


def test_its_links_lead_somewhere():
    assert broken_links(PAGE.read_text(encoding="utf-8")) == []


def test_its_commands_are_taken(tmp_path, monkeypatch):
    found = commands(PAGE.read_text(encoding="utf-8"))
    assert len(found) > 20
    monkeypatch.chdir(tmp_path)
    for module, arguments in found:
        parse(module, shlex.split(arguments), monkeypatch)


def test_what_is_wrong_would_be_noticed(tmp_path, monkeypatch):
    text = (
        "# One, two\n[a](#one-two) [b](#two) [c](RESULTS.md) [d](absent.md) [e](README.md#no)\n"
        "of `eval/records/absent.json`, not of `--json eval/records/to_be.json`;\n"
        "`python -m eval.recall theory\n--outt x`, `python -m eval.recall run --seq-len L`"
    )
    assert broken_links(text) == ["#two", "absent.md#", "README.md#no"]
    assert records_named(text) == {"absent.json"}
    ((module, arguments),) = commands(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        parse(module, shlex.split(arguments), monkeypatch)
