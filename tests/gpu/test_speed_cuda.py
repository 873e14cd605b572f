"""eval.speed on a CUDA GPU: every kernel is right, and events and CUDA graphs time it."""

from __future__ import annotations

import pytest
import torch

from eval.speed import conv
from eval.speed.timing import time_in_turn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICE = torch.device("cuda", 0)


def options(**changes) -> conv.ConvOptions:
    fields = {
        "shapes": [(2, 300, 4, 32)],
        "dtypes": ["float32", "bfloat16"],
        "conv_types": ["head", "depthwise", "multihead", "qkv"],
        "windows": [4, 21],
        "kernels": ["reference", "triton", "conv1d"],
        "repeats": 3,
    }
    return conv.ConvOptions(**fields | changes)


def test_every_kind_is_right_and_triton_is_replayed_from_graphs():
    record = conv.conv_speed(options(), DEVICE)
    assert record["refused"] == []
    for result in record["cases"]:
        assert "triton" not in result["absent"]
        for row in result["kernels"]:
            for direction in ("forward", "forward_backward"):
                seconds = row[direction]["seconds"]
                assert len(seconds["all"]) == 3
                assert seconds["cuda_graph"] or not row["kernel"].startswith("triton"), row


def test_events_time_the_device():
    """Four products take several times as long as one; launches alone would not."""
    x = torch.randn(4096, 4096, device=DEVICE)
    calls = {"one": lambda: x @ x, "four": lambda: x @ x @ x @ x @ x}
    timings = time_in_turn(calls, DEVICE, repeats=10)
    assert 2 < timings["four"].median / timings["one"].median < 8


def test_what_cannot_be_captured_is_timed_eagerly():
    x = torch.randn(100, device=DEVICE)
    timing = time_in_turn({"syncs": lambda: x.sum().item()}, DEVICE, repeats=2)["syncs"]
    assert timing.cuda_graph is False and "not captured" in timing.note
    assert len(timing.seconds) == 2
