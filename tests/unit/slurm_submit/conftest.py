"""A place to submit from."""

from __future__ import annotations

import pytest

from tests.unit.slurm_submit.places import Place


@pytest.fixture
def place(tmp_path, capsys, monkeypatch):
    return Place(tmp_path, capsys, monkeypatch)
