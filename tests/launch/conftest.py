"""A place to submit runs from."""

from __future__ import annotations

import pytest

from tests.launch.places import Place


@pytest.fixture
def place(tmp_path, capsys, monkeypatch):
    return Place(tmp_path, capsys, monkeypatch)
