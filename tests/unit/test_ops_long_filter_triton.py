"""The kernels of long filters where there is no GPU, and what is chosen where there is one."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from cat_lm.ops.long_filter.api import choose_backend
from tests.unit.triton_interpreter import run_cases

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def test_kernels_in_the_interpreter(tmp_path, pytestconfig):
    run_cases(("triton_long_filter_cases.py",), tmp_path, pytestconfig)


def test_serves_a_gpu_alone():
    assert choose_backend("cuda", torch.bfloat16, 16).name == "triton"
    reasons = {"it has no fp64": torch.float64, "conv_state=128 is above its 64": torch.float32}
    for reason, dtype in reasons.items():
        name, said = choose_backend("cuda", dtype, 128)
        assert name == "reference" and reason in said
    with pytest.raises(ValueError, match="it computes cuda tensors, not cpu tensors"):
        choose_backend("cpu", torch.float32, 16, "triton")
