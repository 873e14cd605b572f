"""The C++ kernel of the scan: its choice, threads, exponentials and the layout of a call."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from cat_lm.ops.recurrence import decaying_scan as _scan
from cat_lm.ops.recurrence import decaying_scan_cpu as _scan_cpu
from cat_lm.ops.recurrence import decaying_scan_torch as _scan_torch
from cat_lm.ops.recurrence.decaying_scan import decaying_scan
from cat_lm.ops.runtime import compiler
from tests.conftest import REPOSITORY
from tests.unit.scans import SHAPES, by, inputs, state_of, with_state

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler on this machine"
)


def test_serves_fp32_alone():
    single = torch.zeros(2)
    assert _scan._kernels("auto", single, single) is _scan_cpu and _scan_cpu.KERNEL.is_built
    for other in (torch.float64, torch.bfloat16):
        assert _scan._kernels("auto", single, single.to(other)) is _scan_torch
    assert _scan._kernels("auto", single, torch.zeros(2, device="meta")) is _scan_torch


def test_a_training_step_takes_the_kernel_both_ways(monkeypatch):
    calls = []
    for name in ("forward", "backward"):
        whole = getattr(_scan_cpu, name)
        counted = lambda *inputs, n=name, f=whole: calls.append(n) or f(*inputs)  # noqa: E731
        monkeypatch.setattr(_scan_cpu, name, counted)
    leaves = [s[0].requires_grad_() for s in inputs(*SHAPES["gla's"], 5)]
    decaying_scan(*leaves).sum().backward()
    assert calls == ["forward", "backward"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("kernel", ["scan", "convolution"])
def test_a_forked_child_keeps_out_of_its_parents_threads(kernel):
    """The parent loaded the kernel and used torch's threads, but had not yet called the kernel."""
    code = f"""
import os, signal, torch
from cat_lm.ops import depthwise_conv
from cat_lm.ops.convolution.cpu.kernel import KERNEL
from cat_lm.ops.recurrence import decaying_scan_cpu as _scan_cpu
from cat_lm.ops.recurrence.decaying_scan import decaying_scan
torch.set_num_threads(2)
KERNEL.library(), _scan_cpu.KERNEL.library()
q, x = torch.randn(4, 256, 2, 16), torch.randn(4, 4096, 2, 16)
x.exp()
if os.fork() == 0:
    signal.alarm(30)
    if {kernel == "scan"}:
        decaying_scan(q, q, q, torch.rand(4, 256, 2, 16, 1), -torch.ones(1, 1, 1))
    else:
        depthwise_conv(x, torch.randn(2, 16, 4))
    os._exit(7)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
"""
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=REPOSITORY)


def test_threads_change_nothing():
    torch.manual_seed(0)
    given = with_state(inputs(*SHAPES["mamba's"], 1200))
    assert given[0].numel() * 5 > _scan_cpu.KERNEL.small
    grads, kernel = [torch.randn(2, 3, 1200, 2, 5), state_of(given)], _scan_cpu
    before, results = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(by(kernel, given, grads))
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
    state = torch.zeros(1, 1, 1, *state)
    kept = _scan_cpu.forward(1, k, k, v, rate, one, state)[2]  # before each step
    return kept[0, 0, 2, 0].flatten()


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "values"])
def test_exponentials_are_those_of_fp32(keys):
    exponents = torch.cat([torch.linspace(-87, 88, 701), torch.tensor([0.0, -1e-30, 1e-7, -0.35])])
    wanted = exponents.double().exp()
    assert ((decays(exponents, keys).double() - wanted).abs() <= 2.4e-7 * wanted).all()


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "values"])
def test_decays_beyond_the_numbers_of_fp32(keys):
    found = decays(torch.tensor([-88.0, -1e30, -torch.inf, 90.0, torch.inf, torch.nan]), keys)
    assert not found[:3].any()  # a document that starts keeps nothing of the one before
    assert found[3:5].isposinf().all() and found[5].isnan()


def test_without_a_compiler_torch_computes_the_same(monkeypatch, tmp_path):
    torch.manual_seed(0)
    q, k, v, rate, a = (s[0].requires_grad_() for s in inputs(*SHAPES["mamba's"], 19))
    with_kernel = decaying_scan(q, k, v, rate, a)
    wanted = torch.autograd.grad(with_kernel.square().sum(), (q, k, v, rate, a))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    compiler._load_once.cache_clear()
    try:
        assert "no C++ compiler" in _scan_cpu.KERNEL.library().reason
        without = decaying_scan(q, k, v, rate, a)
        found = torch.autograd.grad(without.square().sum(), (q, k, v, rate, a))
    finally:
        compiler._load_once.cache_clear()
    for one, other in zip((without, *found), (with_kernel, *wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_the_call_is_laid_out_as_in_the_source():
    """Every field of the C++ struct, in order, each 8 bytes wide."""
    source = _scan_cpu.KERNEL.sources.files[0].read_text()
    body = source.split("struct ScanCall {")[1].split("};")[0]
    lines = (line.split("//")[0] for line in body.splitlines())
    kinds = r"\b(?:const|int64_t|float|void)\b"
    fields = re.findall(r"\w+", re.sub(kinds, "", " ".join(lines)))
    assert fields == [name for name, _ in _scan_cpu.KERNEL.struct._fields_]
    assert ctypes.sizeof(_scan_cpu.KERNEL.struct) == 8 * len(fields)
