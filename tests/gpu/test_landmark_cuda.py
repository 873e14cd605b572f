"""Landmark attention's backends on a CUDA GPU, against the masks in fp64."""

from __future__ import annotations

import pytest
import torch

from cat_lm.ops.landmark.blocks import attend_block_major
from cat_lm.ops.landmark.flex import attend_flex
from cat_lm.ops.landmark.keys import block_weights, landmark_keys
from cat_lm.ops.landmark.layout import sequence_blocks
from cat_lm.ops.landmark.reference import attend_flat, attend_grouped
from cat_lm.ops.landmark.segments import attend_segments, why_not
from cat_lm.ops.landmark.select import Choice, choose_blocks
from cat_lm.ops.runtime.triton_launch import INSTALLED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(not INSTALLED, reason="triton is not installed"),
]
SPARSE = {"triton": attend_segments, "flex": attend_flex, "blocks": attend_block_major}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
TIME, BLOCK, SCALING = 1000, 32, 0.125


def relative_error(result: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((result.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("backend", [*SPARSE, "triton, blocks as wholes"])
def test_outputs_and_gradients(backend, dtype, packed):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, n, TIME, 64, device="cuda").to(dtype) for n in (8, 4, 4))
    ids = torch.arange(TIME, device="cuda").expand(2, -1) // 333 if packed else None
    layout = sequence_blocks(TIME, BLOCK, ids, None, query.device)
    marks = landmark_keys(key, block_weights("box", BLOCK).cuda(), layout, False)
    selected, scores = choose_blocks(query, marks, layout, Choice(4, 2, sink=True))
    name, _, wholes = backend.partition(", ")
    logits = (scores * SCALING).detach() if wholes else None
    assert name != "triton" or why_not(query.device, dtype, BLOCK, 64) is None
    dy, found = torch.randn_like(query), []
    for exact in (False, True):
        given = [x.double() if exact else x for x in (query, key, value)]
        given = [x.requires_grad_() for x in given]
        if not exact:
            y = SPARSE[name](*given, selected, layout, 2, SCALING, logits)
        elif wholes:
            y, _ = attend_grouped(*given, logits, selected, layout, 2, SCALING, 0.0, True)
        else:
            y, _ = attend_flat(*given, selected, layout, 2, SCALING, 0.0, True)
        found.append((y, *torch.autograd.grad(y, given, dy.to(y.dtype))))
    for one, wanted in zip(*found, strict=True):
        assert relative_error(one, wanted) < TOLERANCE[dtype]


def test_the_same_bits_every_time():
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, 4, TIME, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    layout = sequence_blocks(TIME, BLOCK, None, None, query.device)
    marks = landmark_keys(key, block_weights("box", BLOCK).cuda(), layout, False)
    selected, _ = choose_blocks(query, marks, layout, Choice(4, 1))
    runs = []
    for _ in range(2):
        y = attend_segments(query, key, value, selected, layout, 1, SCALING, None)
        runs.append((y, *torch.autograd.grad(y.square().sum(), (query, key, value))))
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
