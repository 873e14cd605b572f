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
    for registry in attention.REGISTRIES.values():
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.setattr(mixers.MIXERS, "_entries", dict(mixers.MIXERS._entries))
