"""The engine on a CUDA GPU over NCCL follows the plain loop on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.distributed.ranks import run_on_ranks
from tests.distributed.test_engine import ROWS, bf16_loops, engine_loops, plain_loop

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_fp32_equals_the_cpu():
    cases = [(stage, size) for stage in (0, 1, 2, 3) for size in (1, ROWS)]
    expected, _ = plain_loop()
    for history, _ in run_on_ranks(engine_loops, 1, cases)[0]:
        np.testing.assert_allclose(history, expected, rtol=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_equal_the_cpu():
    """Over NCCL; each step's numbers are the same on both."""
    cases = [(stage, ROWS // 2) for stage in (0, 1, 2, 3)]
    expected, _ = plain_loop()
    for rank in run_on_ranks(engine_loops, 2, cases):
        for history, _ in rank:
            np.testing.assert_allclose(history, expected, rtol=1e-3)


def test_bf16_follows_the_cpu():
    expected = [loss for loss, _ in plain_loop()[0]]
    for losses in run_on_ranks(bf16_loops, 1)[0]:
        np.testing.assert_allclose(losses, expected, rtol=1e-2)
