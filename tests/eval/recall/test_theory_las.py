"""Theorem B.1's head against the language model's LaS attention, and its kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cat_lm.model.attention.modules.las import DecayScores, SmoothedValues
from cat_lm.model.context import Context
from eval.recall.theory import state_space
from eval.recall.theory.state_space import Head, attend, error, nearest


@pytest.mark.parametrize("width", [1, 2, 5, 9])
def test_the_head_is_the_language_models(width):
    """Its decayed logits and smoothed values, at rates of several heads; P beyond the row too."""
    rng, size = np.random.default_rng(0), 7
    decay = DecayScores(3, "steep", 0.2)
    place, heads = torch.arange(size), torch.arange(3)
    logits, value = rng.standard_normal((3, size, size)), rng.standard_normal(size)
    scored = decay.score(
        torch.from_numpy(logits), place[:, None], place[None], heads[:, None, None]
    ).masked_fill(place[:, None] < place, -torch.inf)
    values = torch.from_numpy(value)[None, :, None, None]
    smooth = SmoothedValues(width, None)(values, Context())[0, :, 0]
    expected = scored.softmax(-1) @ smooth
    rates = decay.rates(heads, torch.float64).tolist()
    assert rates[0] == 0 < rates[1] < rates[2]
    for head, rate in enumerate(rates):
        found = attend(logits[head], value, rate, width, causal=True)
        np.testing.assert_allclose(found, expected[head, :, 0], rtol=1e-12)


@pytest.mark.parametrize("length", [1, 3, 20])
def test_the_average_is_inverted(length):
    rng = np.random.default_rng(1)
    for _ in range(4):  # of both signs
        kernel = state_space.averaged(length, rng)
        sign, taps = nearest(kernel, state_space.WIDTH)
        box = np.full(state_space.WIDTH, 1 / state_space.WIDTH)
        np.testing.assert_allclose(sign * np.convolve(taps, box)[:length], kernel, atol=1e-12)
    sign, taps = nearest(np.array([1.0, -3.0, 2.0]))
    assert sign == -1 and taps.tolist() == [0, 3, 0]


def test_a_kernel_with_a_zero_and_one_of_a_single_tap():
    for kernel in ([0.5], [0.0, 2.0, 0.0, 1.0], [-1.0, 0.0, 0.0]):
        inputs = np.arange(1.0, len(kernel) + 1)
        expected = np.convolve(kernel, inputs)[: len(kernel)]
        for head in (Head(), Head(0.5), Head(empty="last", causal=False)):
            np.testing.assert_allclose(head(np.array(kernel), inputs), expected, atol=1e-12)


def test_an_error_that_is_no_number_stays_one():
    assert np.isnan(error(lambda kernel, inputs: inputs * np.nan, state_space.decaying, 1))
