"""The kernels of the decaying scan: their choice, exponentials and memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.ops.recurrence import backends, decaying_scan_cpu, decaying_scan_torch
from cat_lm.ops.recurrence import decaying_scan as scan
from cat_lm.ops.recurrence.delta_rule import CHUNK, delta_rule
from cat_lm.ops.runtime.triton_launch import INSTALLED


def tensor(device: str, dtype: torch.dtype = torch.float32) -> SimpleNamespace:
    return SimpleNamespace(device=torch.device(device), dtype=dtype)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_kernels_serve_fp32_on_one_device(device, monkeypatch):
    if device == "cpu" and not decaying_scan_cpu.KERNEL.is_built:
        pytest.skip(decaying_scan_cpu.KERNEL.library().reason)
    if device != "cpu" and not INSTALLED:
        pytest.skip("triton is not installed")
    single = tensor(device)
    kernels = decaying_scan_cpu if device == "cpu" else scan.decaying_scan_triton
    assert scan._kernels("auto", single, single) is kernels
    for other in (tensor(device, torch.float64), tensor(device, torch.bfloat16), tensor("cuda:1")):
        assert scan._kernels("auto", single, other) is decaying_scan_torch
        assert scan._kernels("auto", other, single) is decaying_scan_torch
    monkeypatch.setattr(backends.triton_launch, "INSTALLED", False)
    assert scan._kernels("auto", tensor("cuda:0"), tensor("cuda:0")) is decaying_scan_torch


def decays(exponents: Tensor, keys: bool) -> Tensor:
    """exp by the C++ kernel: the second step's decays of a state of ones, with K or V of them."""
    state = (len(exponents), 1) if keys else (1, len(exponents))
    k = torch.ones(1, 1, 3, 1, state[0])
    k[:, :, 1:] = 0
    rate = torch.zeros(1, 1, 3, 1, *state)
    rate[0, 0, 1, 0] = exponents.view(state)
    v, one = torch.ones(1, 1, 3, 1, state[1]), torch.ones(1, 1, 1, 1)
    kept = decaying_scan_cpu.forward(1, k, k, v, rate, one, torch.zeros(1, 1, 1, *state))[2]
    return kept[0, 0, 2, 0].flatten()  # before the third step


@pytest.mark.skipif(not decaying_scan_cpu.KERNEL.is_built, reason="the C++ kernel cannot be built")
@pytest.mark.parametrize("keys", [True, False], ids=["keys", "values"])
def test_exponentials_of_cpu_kernel_are_those_of_fp32(keys):
    exponents = torch.cat([torch.linspace(-87, 88, 701), torch.tensor([0.0, -1e-30, 1e-7, -0.35])])
    wanted = exponents.double().exp()
    assert ((decays(exponents, keys).double() - wanted).abs() <= 2.4e-7 * wanted).all()
    found = decays(torch.tensor([-88.0, -1e30, -torch.inf, 90.0, torch.inf, torch.nan]), keys)
    assert not found[:3].any()  # a document that starts keeps nothing of the one before
    assert found[3:5].isposinf().all() and found[5].isnan()


def kept_bytes(time: int) -> int:
    """Return what the delta rule keeps for its gradients."""
    torch.manual_seed(time)
    storages = {}

    def keep(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    q, k = F.normalize(torch.randn(2, 1, time, 2, 3), dim=-1)
    v, rate, decay = torch.randn(1, time, 2, 4), torch.rand(1, time, 2), -torch.rand(1, time, 2)
    streams = [x.requires_grad_() for x in (q, k, v, rate, decay)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        delta_rule(*streams)
    return sum(storage.nbytes() for storage in storages.values())


def test_memory_of_delta_rule_is_linear_in_length():
    assert 3.5 * kept_bytes(4 * CHUNK) < kept_bytes(16 * CHUNK) < 4.5 * kept_bytes(4 * CHUNK)
