"""When the scan's Triton kernels are chosen; `tests/contracts` run them."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from cat_lm.ops.recurrence import backends
from cat_lm.ops.recurrence import decaying_scan as _scan
from cat_lm.ops.recurrence import decaying_scan_torch as _scan_torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def test_serves_fp32_on_a_gpu_alone(monkeypatch):
    def tensor(dtype: torch.dtype = torch.float32, device: str = "cuda:0") -> SimpleNamespace:
        return SimpleNamespace(device=torch.device(device), dtype=dtype)

    single = tensor()
    assert _scan._kernels("auto", single, single) is _scan.decaying_scan_triton
    others = (tensor(torch.float64), tensor(torch.bfloat16), tensor(device="cpu"))
    for other in (*others, tensor(device="cuda:1")):
        assert _scan._kernels("auto", single, other) is _scan_torch
        assert _scan._kernels("auto", other, single) is _scan_torch
    monkeypatch.setattr(backends.triton_launch, "INSTALLED", False)
    assert _scan._kernels("auto", single, single) is _scan_torch


def test_the_kind_of_the_gradient_counts_too(monkeypatch):
    seen = []
    chosen = _scan._kernels
    monkeypatch.setattr(_scan, "_kernels", lambda name, *s: seen.append(len(s)) or chosen(name, *s))
    q = torch.randn(1, 3, 1, 2, requires_grad=True)
    _scan.decaying_scan(q, q, q, -q[..., None].square(), torch.ones(1, 1, 1)).sum().backward()
    assert seen == [6, 7]
