"""The scan's Triton kernels where there is no GPU, and what is chosen where there is one."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from eval.recall.mixers import _scan, _scan_torch
from tests.unit.triton_interpreter import run_cases

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def test_kernels_in_the_interpreter(tmp_path):
    run_cases("triton_scan_cases.py", tmp_path)


def test_serves_fp32_on_a_gpu_alone(monkeypatch):
    def tensor(dtype: torch.dtype, on_gpu: bool = True) -> SimpleNamespace:
        return SimpleNamespace(is_cpu=not on_gpu, is_cuda=on_gpu, dtype=dtype)

    single = tensor(torch.float32)
    assert _scan._kernels(single, single) is _scan._scan_triton
    for other in (tensor(torch.float64), tensor(torch.bfloat16), tensor(torch.float32, False)):
        assert _scan._kernels(single, other) is _scan_torch
    monkeypatch.setattr(_scan.triton, "INSTALLED", False)
    assert _scan._kernels(single, single) is _scan_torch
