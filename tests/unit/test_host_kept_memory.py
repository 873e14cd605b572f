"""Memory that tensors leave is taken again as it is."""

import os
import subprocess
import sys

import pytest

# Pages that the system had to clear for tensors of 64 MiB, one after another.
COUNT = """
import resource, torch
from cat_lm.core.host import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given = min(faults() for _ in range(5))
print(keep_freed_memory())
print(given, min(faults() for _ in range(9)))  # the first ones make room
"""
PAGES = 3 * 2**26 // os.sysconf("SC_PAGE_SIZE")


def counted(**environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    words = [sys.executable, "-c", COUNT]
    result = subprocess.run(
        words, env=clean | environment, capture_output=True, text=True, check=True
    )
    kept, before, after = result.stdout.split()
    return kept == "True", int(before), int(after)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_tensors_take_the_memory_of_those_before_them():
    kept, before, after = counted()
    assert kept
    assert after < PAGES / 100 < before


def test_the_environment_decides_where_it_says_something():
    kept, _, _ = counted(MALLOC_TRIM_THRESHOLD_="131072")
    assert not kept
