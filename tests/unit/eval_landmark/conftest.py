"""The command of eval.landmark."""

import pytest

from eval.landmark.__main__ import main
from tests.unit.calls import call_main


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs the command: its exit code, stdout and stderr."""

    def run(*words):
        return call_main(main, monkeypatch, capsys, "eval.landmark", *words)

    return run
