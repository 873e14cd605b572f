"""Each command, on a damaged file or with an odd word, ends well: done, or refused in one line.

verdict.py has the rules. `python -m tests.fuzz` tries the same for as long as one likes.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.place import Place
from tests.fuzz.server import Server
from tests.fuzz.targets import TARGETS
from tests.fuzz.world import HAS_HARNESS, make_world

# A call of a command takes as long as hundreds of calls of a function; one thing alone is odd.
FEW = settings(
    phases=set(settings.default.phases) - {Phase.shrink, Phase.explain},
    max_examples=max(2, settings.default.max_examples // 20),
    suppress_health_check=list(HealthCheck),
)
_NEEDED_BYTES = 2 * 2**30


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The process that commands are forked from; in memory, as each case writes many files."""
    memory = Path("/dev/shm")
    fits = memory.is_dir() and shutil.disk_usage(memory).free > _NEEDED_BYTES
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory if fits else None) as scratch:
        found = Server(Path(scratch))
        yield found
        found.close()


@pytest.fixture(scope="session")
def world(server: Server) -> Place:
    return make_world(server)


def marked(target):
    marks = [pytest.mark.nightly if target.slow else pytest.mark.long]
    if target.module == "eval.zero_shot" and not HAS_HARNESS:
        marks.append(pytest.mark.skip("needs lm_eval"))
    return pytest.param(target, id=target.name, marks=marks)


every_target = pytest.mark.parametrize("target", [marked(target) for target in TARGETS])


@every_target
def test_command_does_what_it_is_for(world, target):
    world.check(target)


@every_target
@FEW
@given(data=st.data())
def test_odd_input_is_accepted_or_refused_in_one_line(world, target, data):
    world.check(target, data.draw(world.cases(target), label="odd"))
