"""One cluster for all tests of this folder, taken down after the last one, also after Ctrl-C."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.served import served_python
from tests.slurm.cluster import Cluster, why_not


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def served(cluster: Cluster) -> Iterator[str]:
    """A `python` for ranks that are not stopped, nor have to see their launcher die."""
    with served_python() as python:
        yield python
