"""Each test of a check begins with nothing checked, and leaves nothing registered."""

from __future__ import annotations

import pytest

from cat_lm import mixers
from cat_lm.core import causality
from cat_lm.model import attention


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    """Forgets what was checked, and takes away what a test registers."""
    monkeypatch.setattr(causality, "_CHECKED", set())
    entries = {kind: dict(known) for kind, known in attention._ENTRIES.items()}
    monkeypatch.setattr(attention, "_ENTRIES", entries)
    monkeypatch.setattr(mixers, "_KINDS", dict(mixers._KINDS))
