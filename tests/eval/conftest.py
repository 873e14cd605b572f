"""What tests of studies share."""

from __future__ import annotations

import pytest

from eval.lab import cell as cells
from eval.lab import execution


@pytest.fixture
def in_this_process(monkeypatch):
    """Let a study's cells run in the tests' own process."""

    def execute(groups, out, device, workers):
        for run in (run for group in groups for run in group):
            cells.run(out, run.cell, device, quiet=True)

    monkeypatch.setattr(execution, "execute", execute)
