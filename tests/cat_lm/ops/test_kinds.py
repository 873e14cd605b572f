"""A custom kind of convolution: what the table refuses."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from cat_lm.ops.convolution import kinds
from cat_lm.ops.convolution.kinds.reference import check_kind, sum_of_lags


def add_lag(taps, lag, delayed):
    return taps[lag] * delayed


@dataclass(frozen=True)
class Wanting:
    distance: int


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("head", ("W",), add_lag, "one"), "there is one of this name already"),
        (("other", ("H", "D"), add_lag, "one"), "filter_axes=.* and W among them"),
        (("other", ("W", "X"), add_lag, "one"), "filter_axes=.* must be a tuple of W, H, I and D"),
        (("other", ["H", "W"], add_lag, "one"), "filter_axes=.* must be a tuple of W, H, I and D"),
        (("other", ("H", "H", "W"), add_lag, "one"), "filter_axes=.* each at most once"),
        (("other", ("W", "I"), add_lag, "one"), "filter_axes=.* without those written to, H"),
        (("other", ("W",), add_lag, ""), "must give meaning"),
        (("other", ("W",), None, "one"), "add_lag=None must be a function"),
        (("other", ("W",), add_lag, "one", False, dict), "Options must be a frozen dataclass"),
        (("other", ("W",), add_lag, "one", False, Wanting), "frozen dataclass with defaults"),
    ],
)
def test_entry_that_is_wrong_is_refused(given, said):
    with pytest.raises(ValueError, match=f"conv_type '{given[0]}': .*{said}"):
        kinds.register(kinds.Kind(*given))
    assert "other" not in kinds.names()


@pytest.mark.parametrize(
    ("axes", "add_lag", "said"),
    [
        # Filters of one shape, read as if they had another.
        (("H", "W"), lambda taps, lag, x: taps[:, :, lag] * x, "cannot compute with filters"),
        (("W",), lambda taps, lag, x: (taps[lag] * x).sum(2), "makes |cannot compute"),
        (("W",), lambda taps, lag, x: taps[lag] * (x + lag * x.roll(-1, 1)), "reads other tokens"),
        (("W",), lambda taps, lag, x: taps[lag] * (x + lag * x.roll(1, 1)), "reads other tokens"),
        (("W",), lambda taps, lag, x: taps[-1 - lag] * x, "changes its input with 1 at lag 0"),
        (("W",), lambda taps, lag, x: 2 * taps[lag] * x, "changes its input with 1 at lag 0"),
    ],
)
def test_axes_and_sum_that_do_not_fit_are_refused(axes, add_lag, said):
    with pytest.raises(ValueError, match=f"conv_type 'odd': add_lag.*({said})"):
        check_kind(kinds.Kind("odd", axes, add_lag, "odd"))


def test_table_needs_no_torch():
    code = "import sys; from cat_lm.ops.convolution import kinds; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", kinds.names())
def test_sums_stay_in_fp32_under_autocast(name):
    kind, x = kinds.get(name), torch.randn(2, 9, 4, 3)
    filters = torch.randn(kind.filter_shape(4, 3, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = sum_of_lags(kind, x, filters)
    assert found.equal(sum_of_lags(kind, x, filters))
