"""Fixtures that several of these tests need."""

from tests.cat_lm.conftest import plain_flex_attention  # noqa: F401
