"""The Triton kernels where there is no GPU: what they need, and what is compiled anew."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cat_lm.ops.convolution import triton as backend
from cat_lm.ops.runtime import triton_launch

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@needs_triton
def test_sizes_are_tritons():
    import triton

    for n in range(1, 300):
        assert triton_launch.next_power_of_2(n) == triton.next_power_of_2(n)
        assert triton_launch.cdiv(n, 64) == triton.cdiv(n, 64)


def test_says_why_it_cannot_serve(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    if triton_launch.INSTALLED:
        assert "inputs are on cpu" in triton_launch.why_not(cpu, torch.float32)
        assert "float64" in triton_launch.why_not(gpu, torch.float64)
        assert triton_launch.why_not(gpu, torch.bfloat16) is None
    monkeypatch.setattr(triton_launch, "INSTALLED", False)
    assert triton_launch.why_not(gpu, torch.float32) == "triton is not installed"


@needs_triton
@pytest.mark.parametrize("function", ["flash", "cudnn"])
def test_attention_s_output_needs_no_copy(function):
    """transformers transposes and makes it contiguous; its layout is that of the queries."""
    on_meta = {"dtype": torch.bfloat16, "device": "meta"}
    filters = [torch.empty(4, 21, **on_meta) for _ in range(3)]
    streams = backend.convolution.conv_qkv(
        torch.empty(2, 64, 4, 3, 16, **on_meta), *filters, *[None] * 4
    )
    assert all(x.shape == (2, 64, 4, 16) and x.is_contiguous() for x in streams)
    x = torch.empty(2, 64, 4, 3, 16, **on_meta)[:, :, :, 0]
    for kind, shape in (("head", (4, 21)), ("depthwise", (4, 16, 4)), ("multihead", (21, 4, 4))):
        y = backend.convolve(kind, x, torch.empty(shape, **on_meta), None, None)
        assert y.shape == x.shape and y.is_contiguous()
    aten, on_gpu = torch.ops.aten, {"dtype": torch.bfloat16, "device": "cuda"}
    with FakeTensorMode():
        for shape, copied in (((2, 64, 4, 16), False), ((2, 4, 64, 16), True)):
            x = torch.empty(shape, **on_gpu)
            query = x if copied else x.transpose(1, 2)  # [B, H, T, D]
            if function == "flash":
                made = aten._scaled_dot_product_flash_attention(query, query, query, 0.0, True)
            else:
                made = aten._scaled_dot_product_cudnn_attention(
                    query, query, query, None, True, 0.0, True
                )
            assert made[0].transpose(1, 2).is_contiguous() is not copied


@needs_triton
@pytest.mark.parametrize(
    ("conv_type", "dtype", "window", "named"),
    [
        ("head", torch.bfloat16, 21, "matrix units"),
        ("head", torch.bfloat16, 65, "matrix units"),
        ("head", torch.bfloat16, 66, "rotation by a kernel of its own"),
        ("head", torch.bfloat16, 130, "W is above 129"),
        ("head", torch.float32, 21, "fp32"),
        ("depthwise", torch.bfloat16, 4, "filters per channel"),
        ("multihead", torch.bfloat16, 21, "matrix units"),
        ("multihead", torch.float32, 21, "fp32 products"),
    ],
)
def test_describes_what_runs(conv_type, dtype, window, named):
    description = backend.describe(conv_type, dtype, window)
    assert named in description and "interpreter" not in description
    assert ("rotation" in description) == ("rotation" in named)


def launch_all(batch: int, time: int) -> None:
    """Every kernel that takes sequences, forward and backward."""
    from cat_lm.ops.recurrence import decaying_scan_triton

    half = {"dtype": torch.bfloat16, "requires_grad": True}
    positions = torch.zeros(batch, time, dtype=torch.int32)
    angles = torch.zeros(2, 1, time, 16).unbind()
    for kind, shape in (("head", (4, 21)), ("depthwise", (4, 16, 4)), ("multihead", (21, 4, 4))):
        x, filters = torch.zeros(batch, time, 4, 16, **half), torch.zeros(shape, **half)
        backend.convolve(kind, x, filters, None, positions, angles).sum().backward()
    qkv, taps = torch.zeros(batch, time, 4, 3, 16, **half), torch.zeros(4, 21, **half)
    q, k, v = backend.head_conv_qkv(qkv, (taps, None, taps), None, angles, positions)
    (q + k + v).sum().backward()
    rows, a = torch.zeros(1, batch, time, 4, 16), torch.zeros(1, 4, 16, 1)
    state = torch.zeros(1, batch, 4, 16, 16)
    inputs = (rows, rows, rows, rows[..., None], a)
    kept = decaying_scan_triton.forward(64, *inputs, state)[2]
    decaying_scan_triton.backward(64, kept, rows, state, *inputs)


@needs_triton
def test_no_length_or_batch_compiles_anew(monkeypatch):
    """Triton looks a kernel up by what it makes of the arguments: types, divisibility by 16, 1."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    hopper, keys = make_backend(GPUTarget("cuda", 90, 32)), set()

    def run(kernel, *, grid, warmup, **given):
        bind = create_function_from_signature(kernel.signature, kernel.params, hopper)
        keys.add(f"{kernel.fn.__module__} {kernel.fn.__name__} {bind(**given)[1:]}")

    monkeypatch.setattr(triton.JITFunction, "run", run)
    launch_all(2, 64)
    first = set(keys)
    # One of two for each kind, and three: the multi-head one is used twice, and turned by two more.
    assert len(first) == 13
    for batch, time in ((1, 1), (3, 65), (1, 4096)):
        launch_all(batch, time)
    assert keys == first
