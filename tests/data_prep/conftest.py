"""A small source with sets, and what one process makes of it."""

import pytest

from tests.data_prep.helpers import WISHES, made, set_flags, write_sets


@pytest.fixture(scope="session")
def sets(tmp_path_factory):
    return write_sets(tmp_path_factory.mktemp("sets"))


@pytest.fixture(scope="session")
def expected(tmp_path_factory, sets, prepare):
    found = made(prepare(tmp_path_factory.mktemp("whole") / "out", *set_flags(sets, *WISHES)))
    assert len(found) > 2 * 6
    return found
