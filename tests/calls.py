"""A command's `main`, called in the tests' own process."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest


def call_main(
    main: Callable[[], object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    *arguments: object,
) -> tuple[int, str, str]:
    """Call it as the command of that name: its exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    code = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code or 0
    return code, *capsys.readouterr()
