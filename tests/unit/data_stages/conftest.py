"""A small source with sets, and what one process makes of it."""

import pytest

from tests.prepared_data import digests
from tests.unit.data_stages.wishes import WISHES
from tests.unit.test_data_selection import flags as set_flags
from tests.unit.test_data_selection import write_sets


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    return write_sets(tmp_path_factory.mktemp("sets"))


@pytest.fixture(scope="module")
def expected(tmp_path_factory, sets, prepare):
    out = prepare(tmp_path_factory.mktemp("whole") / "out", *set_flags(sets, *WISHES))
    found = digests(out)
    assert len(found) > 2 * 6
    return found
