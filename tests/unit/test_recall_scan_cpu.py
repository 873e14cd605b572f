"""The scan's C++ kernel against the same scan in torch, in double precision."""

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
from cat_lm.ops.recurrence.decaying_scan import EVERY, decaying_scan
from cat_lm.ops.runtime import compiler
from tests.conftest import REPOSITORY
from tests.unit.scans import SHAPES, by, in_torch, inputs, state_of, with_state

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler on this machine"
)


@pytest.mark.parametrize("time", [1, EVERY - 1, EVERY, 2 * EVERY + 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_torch_path(shape, time):
    torch.manual_seed(time)
    given = with_state(inputs(*SHAPES[shape], time))
    grads = [torch.randn(2, 3, time, 2, 5), state_of(given)]
    found = by(_scan_cpu.load_kernel(), given, grads)
    for one, other in zip(found, in_torch(given, grads), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=2e-5)


def test_inputs_may_have_any_strides():
    torch.manual_seed(0)
    q, k, v, rate, a, state = with_state(inputs(*SHAPES["all"], 19, models=1))
    turned = [s.transpose(1, 3).contiguous().transpose(1, 3) for s in (q, k, v)]
    turned_state = state.mT.contiguous().mT
    kernel = _scan_cpu.load_kernel()
    expanded = (rate[:, :, :, :1].expand_as(rate), a[:, :1].expand_as(a))
    found = kernel.forward(EVERY, *turned, *expanded, turned_state)[0]
    wanted = kernel.forward(EVERY, q, k, v, *(s.contiguous() for s in expanded), state)[0]
    assert torch.equal(found, wanted)


def test_serves_fp32_alone():
    single = torch.zeros(2)
    assert _scan._kernels("auto", single, single) is _scan_cpu.load_kernel() is not None
    for other in (torch.float64, torch.bfloat16):
        assert _scan._kernels("auto", single, single.to(other)) is _scan_torch
    assert _scan._kernels("auto", single, torch.zeros(2, device="meta")) is _scan_torch


def test_a_training_step_takes_the_kernel_both_ways(monkeypatch):
    calls = []
    for name in ("forward", "backward"):
        whole = getattr(_scan_cpu.Kernel, name)
        counted = lambda *inputs, n=name, f=whole: calls.append(n) or f(*inputs)  # noqa: E731
        monkeypatch.setattr(_scan_cpu.Kernel, name, counted)
    leaves = [s[0].requires_grad_() for s in inputs(*SHAPES["gla's"], 5)]
    decaying_scan(*leaves).sum().backward()
    assert calls == ["forward", "backward"]


def test_stacked_models_in_fp32():
    torch.manual_seed(0)
    given = inputs(*SHAPES["mamba's"], 2 * EVERY + 3)
    scored = torch.func.grad(lambda *s: decaying_scan(*s).square().sum(), tuple(range(5)))
    alone = [scored(*(s[m].double() for s in given)) for m in range(2)]
    for found, *wanted in zip(torch.func.vmap(scored)(*given), *alone, strict=True):
        assert (found - torch.stack(wanted)).norm() < 1e-5 * torch.stack(wanted).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)], ids=str)
def test_nothing_scans_to_nothing(sizes, dtype):
    rows, time, keys, values = sizes
    q, k, gate = torch.randn(3, rows, time, 2, keys, dtype=dtype)
    v, one = torch.randn(rows, time, 2, values, dtype=dtype), torch.ones(1, 1, 1, dtype=dtype)
    leaves = [s.requires_grad_() for s in (q, k, v, -gate[..., None].square(), one)]
    y = decaying_scan(*leaves)
    y.sum().backward()
    assert y.shape == (rows, time, 2, values) and not y.any()
    assert not any(s.grad.any() for s in leaves)


WRONG = {
    "keys of one head": (1, lambda k: k[:, :, :1]),
    "fewer values' steps": (2, lambda v: v[:, :1]),
    "a rate for one row": (3, lambda r: r[:1]),
    "a rate for one head": (3, lambda r: r[:, :, :1]),
    "a rate for two values": (3, lambda r: r[..., :2]),
    "a of two keys": (4, lambda a: a[:, :2]),
    "a with rows": (4, lambda a: a[None]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("wrong", WRONG)
def test_shapes_that_do_not_fit_are_refused(wrong, dtype):
    given = [s[0].to(dtype) for s in inputs(*SHAPES["all"], 4)]
    index, change = WRONG[wrong]
    given[index] = change(given[index])
    with pytest.raises(ValueError, match="do not fit each other"):
        decaying_scan(*given)


def test_is_one_operator_to_fake_tensors_and_tracing():
    given = [s[0] for s in inputs(*SHAPES["mamba's"], 19)]
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda *s: decaying_scan(*s))(*given)
    other = [s[0] for s in inputs(*SHAPES["mamba's"], 19)]
    assert torch.equal(traced(*other), decaying_scan(*other))
    with torch._subclasses.FakeTensorMode() as mode:
        fake = decaying_scan(*(mode.from_tensor(s) for s in given))
    assert fake.shape == decaying_scan(*given).shape


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("kernel", ["scan", "convolution"])
def test_a_forked_child_keeps_out_of_its_parents_threads(kernel):
    """The parent loaded the kernel and used torch's threads, but had not yet called the kernel."""
    code = f"""
import os, signal, torch
from cat_lm.ops import depthwise_conv
from cat_lm.ops.convolution.cpu.kernel import load_kernel
from cat_lm.ops.recurrence import decaying_scan_cpu as _scan_cpu
from cat_lm.ops.recurrence.decaying_scan import decaying_scan
torch.set_num_threads(2)
load_kernel(), _scan_cpu.load_kernel()
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
    assert given[0].numel() * 5 > _scan_cpu.SMALL
    grads, kernel = [torch.randn(2, 3, 1200, 2, 5), state_of(given)], _scan_cpu.load_kernel()
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
    kept = _scan_cpu.load_kernel().forward(1, k, k, v, rate, one, state)[2]  # before each step
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
