"""What the tests of the length sweep share: texts, and the command in this process."""

from __future__ import annotations

from tests.calls import call_main

TEXT = "The dog saw a bird near the house. Caf\u00e9 7!\n" * 12
DOCUMENTS = (
    "A cat sat.\n" * 13,
    "No.",
    "Seven trees near 12 houses! " * 9,
    "The bird heard it. " * 6,
)


def command(monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
    """Run the command in this process; return its exit code, stdout and stderr."""
    from eval.length_sweep import __main__ as length_sweep

    return call_main(length_sweep.main, monkeypatch, capsys, "length_sweep", *arguments)
