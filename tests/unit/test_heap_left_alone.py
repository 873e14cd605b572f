"""What is there while DeepSpeed starts is not looked at, and afterwards it is collected again."""

from __future__ import annotations

import gc
import weakref

import pytest

from cat_lm.training.distributed import heap_left_alone


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def heap():
    """A heap of which nothing is left alone."""
    gc.unfreeze()
    gc.collect()
    yield
    gc.unfreeze()


def test_cycles_from_before_live_until_the_end(heap):
    before = weakref.ref(Cycle())
    with heap_left_alone():
        within = weakref.ref(Cycle())
        gc.collect()
        assert before() is not None and within() is None
    gc.collect()
    assert before() is None


def test_an_error_ends_it_too(heap):
    with pytest.raises(ValueError, match="x"), heap_left_alone():
        raise ValueError("x")
    assert gc.get_freeze_count() == 0


def test_what_others_froze_stays_so_and_nothing_is_added(heap):
    gc.freeze()
    count = gc.get_freeze_count()
    later = weakref.ref(Cycle())
    with heap_left_alone():
        gc.collect()
        assert later() is None
    assert 0 < gc.get_freeze_count() <= count
