"""The scan's C++ kernel against the same scan in torch, in double precision."""

from __future__ import annotations

import ctypes
import re
import shutil

import pytest
import torch
from torch import Tensor

from cat_lm.ops.cpu import compiler
from eval.recall.mixers import _scan, _scan_cpu
from eval.recall.mixers._scan import EVERY, decaying_scan

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler on this machine"
)

# Sizes of the rate (K, V), and of a (H, K, V), where K = 3, V = 5 and H = 2 of the state.
SHAPES = {
    "mamba's": ((1, 5), (1, 3, 5)),
    "gla's": ((3, 1), (1, 1, 1)),
    "mamba 2's": ((1, 1), (2, 1, 1)),
    "all": ((3, 5), (2, 3, 5)),
    "a along keys": ((1, 5), (2, 3, 1)),
    "one rate": ((1, 1), (1, 3, 5)),
}


def inputs(rate: tuple[int, ...], a: tuple[int, ...], time: int, models: int = 2) -> list[Tensor]:
    """q, k, v, rate and a of `models` models, 3 rows, 2 heads, 3 keys, 5 values."""
    q, k = torch.randn(2, models, 3, time, 2, 3)
    v = torch.randn(models, 3, time, 2, 5)
    return [q, k, v, torch.rand(models, 3, time, 2, *rate), -3 * torch.rand(models, *a)]


def in_torch(given: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Outputs, kept states and gradients in fp64 by the torch path."""
    double = [s.double() for s in given]
    out, kept = _scan._forward(*double)
    return [out, kept, *_scan._backward(*double, kept, grad.double())]


@pytest.mark.parametrize("time", [1, EVERY - 1, EVERY, 2 * EVERY + 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_torch_path(shape, time):
    torch.manual_seed(time)
    given = inputs(*SHAPES[shape], time)
    grad = torch.randn(2, 3, time, 2, 5)
    kernel = _scan_cpu.load_kernel()
    out, kept = kernel.forward(EVERY, *given)
    found = [out, kept, *kernel.backward(EVERY, kept, grad, *given)]
    for one, other in zip(found, in_torch(given, grad), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=2e-5)


def test_inputs_may_have_any_strides():
    torch.manual_seed(0)
    q, k, v, rate, a = inputs(*SHAPES["all"], 19, models=1)
    turned = [s.transpose(1, 3).contiguous().transpose(1, 3) for s in (q, k, v)]
    kernel = _scan_cpu.load_kernel()
    expanded = (rate[:, :, :, :1].expand_as(rate), a[:, :1].expand_as(a))
    found = kernel.forward(EVERY, *turned, *expanded)[0]
    wanted = kernel.forward(EVERY, q, k, v, *(s.contiguous() for s in expanded))[0]
    assert torch.equal(found, wanted)


def test_serves_fp32_alone():
    single = torch.zeros(2)
    assert _scan_cpu.kernel_for(single, single) is _scan_cpu.load_kernel() is not None
    for other in (torch.float64, torch.bfloat16):
        assert _scan_cpu.kernel_for(single, single.to(other)) is None
    assert _scan_cpu.kernel_for(single, torch.zeros(2, device="meta")) is None


def test_threads_change_nothing():
    torch.manual_seed(0)
    given = inputs(*SHAPES["mamba's"], 1200)
    assert given[0].numel() * 5 > _scan_cpu.SMALL
    grad, kernel = torch.randn(2, 3, 1200, 2, 5), _scan_cpu.load_kernel()
    before, results = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            out, kept = kernel.forward(EVERY, *given)
            results.append([out, kept, *kernel.backward(EVERY, kept, grad, *given)])
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *results))


def decays(exponents: Tensor, keys: bool) -> Tensor:
    """exp by the kernel: the second step's decays of a state of ones, with K or V of them."""
    state = (len(exponents), 1) if keys else (1, len(exponents))
    k = torch.ones(1, 1, 3, 1, state[0])
    k[:, :, 1:] = 0
    rate = torch.zeros(1, 1, 3, 1, *state)
    rate[0, 0, 1, 0] = exponents.view(state)
    v, one = torch.ones(1, 1, 3, 1, state[1]), torch.ones(1, 1, 1, 1)
    kept = _scan_cpu.load_kernel().forward(1, k, k, v, rate, one)[1]  # before each step
    return kept[0, 0, 2, 0].flatten()


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "values"])
def test_exponentials_are_those_of_fp32(keys):
    exponents = torch.cat([torch.linspace(-87, 88, 701), torch.tensor([0.0, -1e-30, 1e-7, -0.35])])
    wanted = exponents.double().exp()
    assert ((decays(exponents, keys).double() - wanted).abs() <= 2.4e-7 * wanted).all()


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "values"])
def test_decays_beyond_the_numbers_of_fp32(keys):
    found = decays(torch.tensor([-88.0, -1e30, -torch.inf, 90.0, torch.inf, torch.nan]), keys)
    assert (found[:3] >= 0).all() and (found[:3] < 1.3e-38).all()
    assert found[3:5].isposinf().all() and found[5].isnan()


def test_without_a_compiler_torch_computes_the_same(monkeypatch, tmp_path):
    torch.manual_seed(0)
    q, k, v, rate, a = (s[0].requires_grad_() for s in inputs(*SHAPES["mamba's"], 19))
    with_kernel = decaying_scan(q, k, v, rate, a)
    wanted = torch.autograd.grad(with_kernel.square().sum(), (q, k, v, rate, a))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    for cached in (compiler._load_once, _scan_cpu.load_kernel):
        cached.cache_clear()
    try:
        assert _scan_cpu.load_kernel() is None
        assert "no C++ compiler" in compiler.load_library(_scan_cpu.SCAN).reason
        without = decaying_scan(q, k, v, rate, a)
        found = torch.autograd.grad(without.square().sum(), (q, k, v, rate, a))
    finally:
        for cached in (compiler._load_once, _scan_cpu.load_kernel):
            cached.cache_clear()
    for one, other in zip((without, *found), (with_kernel, *wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_the_call_is_laid_out_as_in_the_source():
    """Every field of the C++ struct, in order, each 8 bytes wide."""
    source = _scan_cpu.SCAN.files[0].read_text()
    body = source.split("struct ScanCall {")[1].split("};")[0]
    lines = (line.split("//")[0] for line in body.splitlines())
    kinds = r"\b(?:const|int64_t|float|void)\b"
    fields = re.findall(r"\w+", re.sub(kinds, "", " ".join(lines)))
    assert fields == [name for name, _ in _scan_cpu._Call._fields_]
    assert ctypes.sizeof(_scan_cpu._Call) == 8 * len(fields)
