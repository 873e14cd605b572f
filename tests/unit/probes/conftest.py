"""Each test of a probe begins with nothing tried, and leaves nothing registered."""

from __future__ import annotations

import pytest

from cat_lm import mixers
from cat_lm.mixers import probe as mixer_probe
from cat_lm.model import attention
from cat_lm.model.attention import probe


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    """Forgets what was tried, and takes away what a test registers."""
    monkeypatch.setattr(probe, "_TRIED", set())
    monkeypatch.setattr(mixer_probe, "_TRIED", set())
    entries = {kind: dict(known) for kind, known in attention._ENTRIES.items()}
    monkeypatch.setattr(attention, "_ENTRIES", entries)
    monkeypatch.setattr(mixers, "_KINDS", dict(mixers._KINDS))
