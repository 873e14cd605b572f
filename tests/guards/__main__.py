"""Compares what this code computes and writes with what it did: `python -m tests.guards`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.guards import processes
from tests.guards.comparison import differences
from tests.guards.models import ROOT

GROUPS = ("losses", "values", "formats", "pages")
GOLDEN = Path(__file__).parent / "golden"
SHOWN = 40


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.guards", description=__doc__)
    parser.add_argument(
        "groups", nargs="*", choices=[*GROUPS, []], help=f"some of {', '.join(GROUPS)}; all"
    )
    parser.add_argument("--write", action="store_true", help="write the golden files instead")
    parser.add_argument(
        "--against", metavar="REV", help="compare bit for bit with this revision, measured here"
    )
    parser.add_argument(
        "--speed", action="store_true", help="with --against: time both in pairs, and nothing else"
    )
    parser.add_argument("--measure", metavar="FILE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.speed and not arguments.against:
        parser.error("--speed: needs --against REV")
    processes.prepare_environment()
    groups = arguments.groups or list(GROUPS)
    if arguments.measure:
        Path(arguments.measure).write_text(json.dumps(measure(groups)))
    elif arguments.write:
        for group, found in measure(groups).items():
            write_golden(group, found)
    elif arguments.speed:
        sys.exit(compare_speed(arguments.against))
    else:
        sys.exit(report(groups, arguments.against))


def measure(groups: list[str]) -> dict[str, Any]:
    """Return what the groups measure of this checkout."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        for group in groups:
            folder = Path(name) / group
            folder.mkdir()
            found[group] = importlib.import_module(f"tests.guards.{group}").measure(folder)
    return found


def read_golden(group: str) -> Any:
    """Return the committed numbers of a group."""
    return json.loads((GOLDEN / f"{group}.json").read_text(encoding="utf-8"))


def write_golden(group: str, found: dict[str, Any]) -> None:
    """Write a group's numbers, one case a line."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    (GOLDEN / f"{group}.json").write_text(text, encoding="utf-8")


def report(groups: list[str], revision: str | None) -> int:
    """Print what differs from the golden files or a revision; return the exit code."""
    found = measure(groups)
    expected = measure_at(revision, groups) if revision else {g: read_golden(g) for g in groups}
    wrong = []
    for group in groups:
        wrong += differences(group, expected[group], found[group], exact=bool(revision))
    print("\n".join(wrong[:SHOWN]))
    if len(wrong) > SHOWN:
        print(f"… and {len(wrong) - SHOWN} more")
    print(f"{', '.join(groups)}: {len(wrong)} differences")
    return 1 if wrong else 0


def measure_at(revision: str, groups: list[str]) -> dict[str, Any]:
    """Return what the groups measure of another revision, by these guards."""
    with checkout(revision) as folder:
        out = folder / "guards.json"
        command = [sys.executable, "-m", "tests.guards", *groups, "--measure", str(out)]
        subprocess.run(command, cwd=folder, check=True, env=_environment(folder))
        return json.loads(out.read_text())


def compare_speed(revision: str) -> int:
    """Print the ratios of a revision's seconds to this checkout's; return the exit code."""
    from tests.guards import speed

    with checkout(revision) as old, tempfile.TemporaryDirectory() as folder:
        lines, failures = speed.compare(old, ROOT, Path(folder))
    print(f"seconds here; {revision[:12]}'s seconds / these, [95% interval of {speed.PAIRS} pairs]")
    print("\n".join(lines))
    for line in failures:
        print(f"slower: {line}")
    return 1 if failures else 0


@contextlib.contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """Clone a revision into a temporary folder, with these guards in it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkout"
        subprocess.run(["git", "clone", "-q", "--no-checkout", ROOT, folder], check=True)
        subprocess.run(["git", "checkout", "-q", revision], cwd=folder, check=True)
        shutil.rmtree(folder / "tests/guards", ignore_errors=True)
        shutil.copytree(ROOT / "tests/guards", folder / "tests/guards")
        yield folder


def _environment(folder: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(folder)}


if __name__ == "__main__":
    main()
