"""Long filters' kernels in Triton's interpreter; test_ops_triton.py runs this file."""

from __future__ import annotations

import pytest
import torch

from cat_lm.ops.long_filter import chunks, chunks_triton, filters
from cat_lm.ops.long_filter.api import long_conv
from tests.unit.long_filters import KINDS, random_numbers


def case(kind, time, width, packed):
    torch.manual_seed(time)
    numbers = random_numbers(kind, 2, KINDS[kind])
    chunk = chunks.chunk_of(filters.get(kind).modes_of(numbers, KINDS[kind]), min(16, time))
    x, dy = (torch.randn(2, time, 2, width).double() for _ in range(2))
    initial, dlast = (torch.randn(2, 2, KINDS[kind], width).double() for _ in range(2))
    positions = None
    if packed:
        ids = (torch.arange(time) >= torch.tensor([[5], [16]])).long()
        ids[0] += (torch.arange(time) >= 6).long()
        positions = (torch.arange(time) - (ids[:, None] < ids[..., None]).sum(2)).int()
    return chunk, x, dy, initial, dlast, positions


@pytest.mark.parametrize(
    ("kind", "time", "width", "packed"),
    [
        ("ssm", 40, 5, True),  # a rest, documents of one token and from chunk to chunk
        ("ssm", 32, 20, False),  # channels in two programs
        ("exponential", 3, 4, False),
    ],
)
def test_kernels_compute_what_torch_does(kind, time, width, packed, monkeypatch):
    monkeypatch.setattr(chunks_triton, "COLUMNS", 16)
    chunk, x, dy, initial, dlast, positions = case(kind, time, width, packed)
    expected = chunks.forward(x, chunk, positions, initial)
    single = chunks.Chunk(*(m.float() for m in chunk))
    # Any strides but that of channels.
    turned = x.float().transpose(1, 2).contiguous().transpose(1, 2)
    found = chunks_triton.forward(turned, single, positions, initial.float())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    given = (dy, dlast, x, chunk, positions, expected[2])
    dx, matrices, dinitial = chunks.backward(*given)
    given = (dy.float(), dlast.float(), turned, single, positions, expected[2].float())
    found_x, found_matrices, found_initial = chunks_triton.backward(*given)
    pairs = ((found_x, dx), (found_initial, dinitial), *zip(found_matrices, matrices, strict=True))
    for one, other in pairs:
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=2e-5)


def test_the_operator_takes_them_and_the_future_changes_no_bit():
    torch.manual_seed(0)
    modes = filters.get("ssm").modes_of(random_numbers("ssm", 1, 6, torch.float32), 6)
    x = torch.randn(1, 70, 1, 4).bfloat16()
    changed = x.clone()
    changed[:, 40:] *= 1e3
    before, after = (long_conv(s, modes, backend="triton") for s in (x, changed))
    assert before.dtype == torch.bfloat16
    assert torch.equal(before[:, :40], after[:, :40]) and not torch.equal(before, after)
    torch.testing.assert_close(
        before, long_conv(x, modes, backend="reference"), rtol=2**-7, atol=1e-5
    )
