"""Tests of landmark attention's kernels through Triton's interpreter, run by test_ops_triton.py."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from cat_lm.ops.landmark import segments_triton
from cat_lm.ops.landmark.dispatch import attend_blocks
from cat_lm.ops.landmark.keys import block_weights, landmark_keys
from cat_lm.ops.landmark.layout import cached_blocks, sequence_blocks
from cat_lm.ops.landmark.segments import attend_segments, why_not
from cat_lm.ops.landmark.select import Choice, choose_blocks

BLOCK, SCALING = 5, 0.4
DOCUMENTS = torch.tensor([[0] * 6 + [1] * 2 + [2] * 17, [0] * 4 + [1] * 21])
REAL = (torch.arange(25) >= torch.tensor([[0], [6]])) & (torch.arange(25) < 23)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """A block's queries are in several tiles."""
    usual = segments_triton.options
    monkeypatch.setattr(segments_triton, "options", lambda *given: usual(*given) | {"TILE": 16})


def drawn(heads: int = 4, shared: int = 2, time: int = 25, width: int = 12):
    generator = torch.Generator().manual_seed(heads + shared)
    return tuple(
        torch.randn(2, time, count, width, generator=generator).transpose(1, 2)
        for count in (heads, shared, shared)
    )


CASES = {
    "plain": (None, None, Choice(2, 1)),
    "sink, documents": (DOCUMENTS, None, Choice(1, 2, sink=True)),
    "layer, padding": (None, REAL, Choice(2, 2, share="layer")),
    "documents and padding": (DOCUMENTS, REAL, Choice(2, 1)),
}


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_the_masks(case):
    documents, padding, choice = CASES[case]
    query, key, value = (x.requires_grad_() for x in drawn())
    layout = sequence_blocks(25, BLOCK, documents, padding, query.device)
    marks = landmark_keys(key, block_weights("box", BLOCK), layout, False)
    selected = choose_blocks(query, marks, layout, choice)
    ours = attend_segments(query, key, value, selected, layout, choice.local, SCALING)
    given = (query, key, value, selected, layout, choice.local, SCALING, 0.0)
    wanted, _ = attend_blocks("eager", *given)
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)
    weights = torch.randn_like(wanted)
    inputs = (query, key, value)
    for one, other in zip(
        torch.autograd.grad((ours * weights).sum(), inputs),
        torch.autograd.grad((wanted * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("time", [1, BLOCK, 3 * BLOCK + 2])
def test_all_blocks_are_dense_attention(time):
    query, key, value = drawn(3, 3, time)
    layout = sequence_blocks(time, BLOCK, None, None, query.device)
    marks = landmark_keys(key, block_weights("box", BLOCK), layout, False)
    selected = choose_blocks(query, marks, layout, Choice(99, 1))
    ours = attend_segments(query, key, value, selected, layout, 1, SCALING)
    wanted = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=SCALING)
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


def test_the_newest_queries_after_a_cache_in_half_precision():
    query, key, value = (x.bfloat16() for x in drawn(4, 2))
    layout = cached_blocks(8, 17, BLOCK, torch.tensor([0, 3]))
    marks = landmark_keys(key, block_weights("box", BLOCK), layout, False)
    query = query[:, :, 8:]
    selected = choose_blocks(query, marks, layout, Choice(1, 2))
    assert why_not(query.device, query.dtype, BLOCK, 12) is None
    given = (query, key, value, selected, layout, 2, SCALING, 0.0)
    ours, _ = attend_blocks("sdpa", *given)  # more than gather takes
    wanted, _ = attend_blocks("eager", *(x.float() for x in given[:3]), *given[3:])
    assert ours.dtype == torch.bfloat16 and not ours.isnan().any()
    torch.testing.assert_close(ours.float(), wanted, rtol=3e-2, atol=3e-2)
