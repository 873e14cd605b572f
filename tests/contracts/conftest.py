"""Helpers that several contracts share."""

import pytest

from tests.cat_lm.conftest import plain_flex_attention  # noqa: F401


@pytest.fixture(autouse=True)
def uncompiled(plain_flex_attention):  # noqa: F811
    """Leave flex attention uncompiled, which takes seconds a shape."""
