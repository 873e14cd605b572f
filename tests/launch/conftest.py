"""launch's commands in the tests' own process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from launch.doctor import __main__ as program
from tests.calls import call_main
from tests.launch.places import Place


@pytest.fixture
def place(tmp_path, capsys, monkeypatch):
    return Place(tmp_path, capsys, monkeypatch)


@pytest.fixture
def doctor(capsys, monkeypatch) -> Callable[..., tuple[int, str, str]]:
    """Runs launch.doctor: its exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        return call_main(program.main, monkeypatch, capsys, "launch.doctor", *arguments)

    return run
