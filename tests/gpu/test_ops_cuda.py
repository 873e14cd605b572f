"""The Triton kernels on a CUDA GPU: real shapes, any strides, determinism, graphs, long offsets.

Compared in relative error of whole tensors with the definition in fp64, lag by lag, on the GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.ops.convolution import kinds
from cat_lm.ops.convolution import triton as backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(not backend.INSTALLED, reason="triton is not installed"),
]

# bf16 and fp16 results are rounded once, and rotated gradients a second time before the product.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4}
CUDA = {"device": "cuda"}


def definition(kind: str, x: Tensor, filters: Tensor, positions: Tensor | None) -> Tensor:
    """Return the convolution without its bias, lag by lag, in the dtype of x."""
    window, y = kinds.get(kind).window_of(filters), torch.zeros_like(x)
    for lag in range(min(window, x.shape[1])):
        delayed = F.pad(x[:, : x.shape[1] - lag], (0, 0, 0, 0, lag, 0))
        if positions is not None:
            delayed = torch.where((positions >= lag)[:, :, None, None], delayed, 0.0)
        if kind == "head":
            y = y + filters[:, lag, None] * delayed
        elif kind == "depthwise":
            y = y + filters[:, :, lag] * delayed
        else:
            y = y + torch.einsum("ih,bthd->btid", filters[lag], delayed)
    return y


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    first, second = x[..., : width // 2], x[..., width // 2 : width]
    turned = torch.cat([-second, first], dim=-1) * sin[:, :, None]
    return torch.cat([x[..., :width] * cos[:, :, None] + turned, x[..., width:]], dim=-1)


def filter_shape(kind: str, heads: int, width: int, window: int) -> tuple[int, ...]:
    return kinds.get(kind).filter_shape(heads, width, window)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, **CUDA).to(dtype).requires_grad_()


def documents(batch: int, time: int) -> Tensor:
    """Positions in documents that begin with a probability of 1/50 at each token."""
    starts = torch.rand(batch, time, **CUDA) < 0.02
    starts[:, 0] = True
    steps = torch.arange(time, **CUDA).expand(batch, time)
    return (steps - torch.where(starts, steps, 0).cummax(dim=1).values).int()


def relative_error(result: Tensor, wanted: Tensor) -> float:
    return ((result.double() - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()


def check_convolution(kind, shape, window, dtype, positions=None, rotary=0):
    heads, width = shape[2:]
    torch.manual_seed(window)
    x = random(*shape, dtype=dtype)
    filters = random(*filter_shape(kind, heads, width, window), dtype=dtype)
    bias = random(heads, width, dtype=dtype)
    leaves = (x, filters, bias)
    dy = torch.randn(shape, **CUDA).to(dtype)
    angles = torch.randn(1, shape[1], rotary, **CUDA)
    turn = (angles.cos(), angles.sin()) if rotary else None
    y = backend.convolve(kind, x, filters, bias, positions, turn)
    results = (y, *torch.autograd.grad(y, leaves, dy))
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted = definition(kind, exact[0], exact[1], positions) + exact[2]
    if rotary:
        wanted = rotated(wanted, angles.double().cos(), angles.double().sin())
    wanted = (wanted, *torch.autograd.grad(wanted, exact, dy.double()))
    for index, pair in enumerate(zip(results, wanted, strict=True)):
        assert relative_error(*pair) < TOLERANCE[dtype], f"tensor {index}"


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [1, 3, 21, 64, 128])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("head", (2, 2048, 16, 64)),
        ("head", (1, 2048, 16, 128)),
        ("head", (2, 1000, 5, 80)),
        ("depthwise", (1, 2048, 16, 64)),
        ("multihead", (1, 1024, 16, 64)),
    ],
)
def test_equals_the_definition(kind, shape, window, dtype, masked):
    check_convolution(kind, shape, window, dtype, documents(*shape[:2]) if masked else None)


@pytest.mark.parametrize("kind", ["head", "depthwise", "multihead"])
@pytest.mark.parametrize("window", [21, 65, 100])
@pytest.mark.parametrize("rotary", [16, 64])
@pytest.mark.parametrize("masked", [False, True])
def test_rotated_equals_the_definition(kind, window, rotary, masked):
    shape = (2, 1024, 16, 64)
    positions = documents(*shape[:2]) if masked else None
    check_convolution(kind, shape, window, torch.bfloat16, positions, rotary=rotary)


def packed_arguments(batch, time, heads, width, rotary, window, dtype, streams="qkv"):
    torch.manual_seed(width)
    qkv = random(batch, time, heads, 3, width, dtype=dtype)
    filters = [random(heads, window, dtype=dtype) if s in streams else None for s in "qkv"]
    bias = random(heads, 3, width, dtype=dtype)
    angles = torch.randn(1, time, rotary, **CUDA)
    turn = (angles.cos().to(dtype), angles.sin().to(dtype)) if rotary else None
    return qkv, filters, bias, turn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("shape", "rotary", "window", "streams"),
    [
        ((2, 2048, 16, 64), 16, 21, "qkv"),
        ((1, 2048, 16, 128), 32, 21, "qkv"),
        ((1, 2048, 16, 128), 128, 64, "kv"),
        ((1, 300, 5, 80), 20, 128, "qv"),
        ((1, 300, 5, 64), 20, 100, "qkv"),
        ((2, 300, 4, 64), 0, 4, "k"),
    ],
)
def test_packed_equals_the_definition(shape, rotary, window, streams, masked, dtype):
    qkv, filters, bias, turn = packed_arguments(*shape, rotary, window, dtype, streams)
    positions = documents(*shape[:2]) if masked else None
    leaves = [leaf for leaf in (qkv, *filters, bias) if leaf is not None]
    gradients = [torch.randn(shape, **CUDA).to(dtype) for _ in range(3)]
    outputs = backend.convolution.conv_qkv(qkv, *filters, bias, *(turn or (None, None)), positions)
    results = (*outputs, *torch.autograd.grad(outputs, leaves, gradients))

    exact = {id(leaf): leaf.detach().double().requires_grad_() for leaf in leaves}
    wanted = []
    for index, taps in enumerate(filters):
        y = exact[id(qkv)][:, :, :, index]
        if taps is not None:
            y = definition("head", y, exact[id(taps)], positions)
        y = y + exact[id(bias)][:, index]
        if rotary and index < 2:
            y = rotated(y, turn[0].double(), turn[1].double())
        wanted.append(y)
    dwanted = torch.autograd.grad(wanted, list(exact.values()), [g.double() for g in gradients])
    for index, pair in enumerate(zip(results, (*wanted, *dwanted), strict=True)):
        assert relative_error(*pair) < TOLERANCE[dtype], f"tensor {index}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["head", "depthwise", "multihead"])
def test_gradients_are_the_same_in_every_run(kind, dtype):
    x = random(4, 2048, 16, 64, dtype=dtype)
    filters = random(*filter_shape(kind, 16, 64, 21), dtype=dtype)
    bias = random(16, 64, dtype=dtype)
    dy = torch.randn_like(x)
    runs = []
    for _ in range(3):
        y = backend.convolve(kind, x, filters, bias, None)
        runs.append((y, *torch.autograd.grad(y, (x, filters, bias), dy)))
    for run in runs[1:]:
        assert all(torch.equal(one, two) for one, two in zip(runs[0], run, strict=True))


def test_captured_in_a_graph():
    """Launches allocate through torch and never wait for the device."""
    qkv, filters, bias, turn = packed_arguments(1, 512, 4, 64, 16, 21, torch.bfloat16)

    def step() -> tuple[Tensor, ...]:
        outputs = backend.convolution.conv_qkv(qkv, *filters, bias, *(turn or (None, None)), None)
        gradients = torch.autograd.grad(outputs, (qkv, *filters, bias), outputs)
        return *outputs, *gradients

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        qkv.normal_()
    graph.replay()
    assert all(torch.equal(one, two) for one, two in zip(captured, step(), strict=True))


@pytest.mark.parametrize("kind", ["head", "depthwise"])
def test_more_than_two_to_the_31_elements(kind):
    """The last row, head and step of a tensor whose offsets need 64 bits."""
    shape = (5, 131072, 32, 112)  # 2.35e9 elements
    if torch.cuda.get_device_properties(0).total_memory < 60e9:
        pytest.skip("needs a GPU with 60 GB of memory")
    x = torch.empty(shape, dtype=torch.bfloat16, **CUDA).normal_()
    filters = torch.randn(filter_shape(kind, 32, 112, 5), **CUDA).bfloat16()
    end = definition(kind, x[-1:, -64:].double(), filters.double(), None)[:, 4:]
    leaf = x.requires_grad_()
    y = backend.convolve(kind, leaf, filters, None, None)
    assert relative_error(y[-1:, -60:].detach(), end) < TOLERANCE[torch.bfloat16]
    dy = torch.zeros((), dtype=torch.bfloat16, **CUDA).expand(shape).contiguous()
    dy[-1, -1] = 1.0
    (dx,) = torch.autograd.grad(y, leaf, dy)
    taps = filters.flip(-1)
    wanted = taps[:, None].mT if kind == "head" else taps.mT
    wanted = wanted.transpose(0, 1).expand(5, 32, 112)
    assert torch.equal(dx[-1, -5:], wanted)
    assert not dx[0].any()
