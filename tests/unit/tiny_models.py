"""Small models, for the tests of this folder; they stand in tests/tiny_models.py."""

from tests.tiny_models import *  # noqa: F403
