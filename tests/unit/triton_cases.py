"""Tests of the Triton kernels through Triton's interpreter; test_ops_triton.py runs this file.

Compared with the definitions in fp64, lag by lag.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.ops import rotate
from cat_lm.ops.convolution import triton as backend
from cat_lm.ops.convolution.triton import rotation
from cat_lm.ops.convolution.triton.convolution import conv, conv_backward
from cat_lm.ops.convolution.triton.multihead import (
    multihead_conv,
    multihead_conv_df,
    multihead_conv_dx,
)
from cat_lm.ops.convolution.triton.qkv import conv_qkv, conv_qkv_backward
from cat_lm.training.preflight.kernel_trial import why_no_kernel

# Relative errors of whole tensors: fp32 sums; one rounding of a half-precision result, which the
# interpreter does toward zero for bf16.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
LONG = functools.partial(pytest.param, marks=pytest.mark.long)


def definition(kind: str, x: Tensor, filters: Tensor, positions: Tensor | None) -> Tensor:
    """The convolution without its bias, in the dtype of x."""
    window = filters.shape[0] if kind == "multihead" else filters.shape[-1]
    y = torch.zeros_like(x)
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
    shapes = {"head": (heads, window), "depthwise": (heads, width, window)}
    return shapes.get(kind, (window, heads, heads))


def uneven_positions(batch: int, time: int) -> Tensor:
    """Documents with borders inside of tiles (of 64 steps) and shortly before the second one."""
    lengths = [1, 30, 30, 4, time]
    rows = []
    for row in range(batch):
        order = lengths[row % 5 :] + lengths[: row % 5]
        rows.append(torch.cat([torch.arange(n) for n in order])[:time])
    return torch.stack(rows).int()


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def check(results, wanted, dtype: torch.dtype) -> None:
    for index, (result, want) in enumerate(zip(results, wanted, strict=True)):
        assert result.dtype == dtype and result.shape == want.shape
        error = (result.double() - want).norm() / want.norm().clamp(min=1e-30)
        assert error < TOLERANCE[dtype], f"tensor {index}: relative error {error:.1e}"


def check_convolution(
    kind, shape, window, dtype, documents=False, *, arrange=None, gradient=None, rotary=0, rows=1
):
    """Result and all gradients; `arrange` changes the strides of x, `gradient` gives dy."""
    batch, time, heads, width = shape
    torch.manual_seed(window)
    x = random(*shape, dtype=dtype)
    filters = random(*filter_shape(kind, heads, width, window), dtype=dtype)
    bias = random(heads, width, dtype=dtype)
    positions = uneven_positions(batch, time) if documents else None
    angles = torch.randn(rows, time, rotary)
    turn = (angles.cos(), angles.sin()) if rotary else None
    dy = torch.randn(shape).to(dtype) if gradient is None else gradient.to(dtype).expand(shape)
    leaves = (x, filters, bias)

    y = backend.convolve(kind, x if arrange is None else arrange(x), filters, bias, positions, turn)
    assert y.is_contiguous()
    results = (y, *torch.autograd.grad(y, leaves, dy))

    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    want = definition(kind, exact[0], exact[1], positions) + exact[2]
    if rotary:
        want = rotated(want, angles.double().cos(), angles.double().sin())
    check(results, (want, *torch.autograd.grad(want, exact, dy.double())), dtype)


@pytest.mark.parametrize("dtype", [BF16, LONG(FP32), LONG(FP16)])
@pytest.mark.parametrize(
    ("shape", "window", "documents"),
    [
        ((2, 70, 3, 16), 5, False),
        ((2, 70, 2, 24), 21, True),
        ((1, 1, 1, 16), 3, False),
        ((1, 7, 1, 16), 21, True),
        ((1, 66, 1, 16), 1, False),
        ((1, 66, 1, 80), 4, False),
    ],
)
def test_head(dtype, shape, window, documents):
    check_convolution("head", shape, window, dtype, documents)


@pytest.mark.parametrize("window", [17, 129, *map(LONG, (2, 18, 64, 128, 130))])
def test_head_windows(window):
    """Each width of the halo, and the first window that is beyond the widest."""
    check_convolution("head", (1, 140, 1, 16), window, BF16)


def test_head_many_tiles_in_a_program(monkeypatch):
    """Long inputs: sums over the tiles of a program, and over programs of different lengths."""
    monkeypatch.setattr("cat_lm.ops.convolution.triton.launch.PROGRAMS", 2)
    check_convolution("head", (3, 130, 2, 16), 9, BF16)
    check_convolution("head", (3, 130, 2, 16), 9, BF16, documents=True)


@pytest.mark.parametrize("dtype", [BF16, LONG(FP32)])
@pytest.mark.parametrize(
    ("shape", "window", "documents"),
    [((2, 66, 2, 24), 4, True), ((1, 1, 1, 80), 3, False), ((1, 9, 1, 16), 21, False)],
)
def test_depthwise(dtype, shape, window, documents):
    check_convolution("depthwise", shape, window, dtype, documents)


@pytest.mark.parametrize("dtype", [BF16, LONG(FP32)])
@pytest.mark.parametrize(
    ("shape", "window", "documents"),
    [
        ((2, 19, 3, 16), 5, True),
        ((1, 34, 2, 24), 21, False),
        ((1, 4, 17, 16), 2, False),
        ((1, 1, 1, 16), 3, False),
        ((1, 10, 2, 16), 1, True),
    ],
)
def test_multihead(dtype, shape, window, documents):
    check_convolution("multihead", shape, window, dtype, documents)


def test_multihead_wide_window():
    check_convolution("multihead", (1, 12, 2, 16), 130, BF16)


@pytest.mark.parametrize("dtype", [BF16, LONG(FP32)])
@pytest.mark.parametrize(
    ("kind", "shape", "window", "how"),
    [
        # Rotated columns apart from the others, and all of them.
        ("head", (2, 66, 2, 48), 4, {"rotary": 16, "rows": 2}),
        ("head", (1, 66, 1, 16), 21, {"rotary": 16, "documents": True}),
        ("depthwise", (2, 66, 2, 24), 4, {"rotary": 6, "rows": 2, "documents": True}),
        ("depthwise", (1, 3, 1, 80), 2, {"rotary": 80}),  # partners in another chunk
        ("multihead", (2, 9, 2, 24), 4, {"rotary": 6, "rows": 2, "documents": True}),
        ("multihead", (1, 1, 3, 16), 2, {"rotary": 16}),
    ],
)
def test_convolved_and_rotated(dtype, kind, shape, window, how):
    check_convolution(kind, shape, window, dtype, **how)


@pytest.mark.parametrize(
    ("shape", "rotary", "rows"),
    [((2, 5, 3, 24), 6, 2), ((1, 1, 1, 16), 16, 1), ((2, 33, 2, 40), 4, 1)],
)
def test_rotation_alone(shape, rotary, rows, monkeypatch):
    """Several programs a row, out of place and in place, and the gradient."""
    monkeypatch.setattr(rotation, "ELEMENTS", 16)
    dtype = torch.float32
    leaf, angles = random(*shape, dtype=dtype), torch.randn(rows, shape[1], rotary)
    turn = (angles.cos(), angles.sin())
    x = leaf.mT.contiguous().mT  # copied: the kernel wants neighbours in the last dimension
    y = rotate(x, *turn, backend="triton")
    exact = leaf.detach().double().requires_grad_()
    want = rotated(exact, angles.double().cos(), angles.double().sin())
    dy = torch.randn(shape[2], *shape[:2], shape[3]).permute(1, 2, 0, 3)
    found = torch.autograd.grad(y, leaf, dy)
    check((y, *found), (want, *torch.autograd.grad(want, exact, dy.double())), dtype)
    own = leaf.detach().clone()
    rotation.turn(own, own, *turn)
    assert torch.equal(own, y)


@pytest.mark.parametrize("kind", ["head", "depthwise", "multihead"])
@pytest.mark.parametrize("dtype", [BF16, LONG(FP32)])
def test_any_strides(kind, dtype):
    shape = (2, 12, 2, 16)
    arrangements = [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
        lambda x: torch.stack([x, x], dim=3)[:, :, :, 1],
    ]
    gradients = [
        torch.randn(2, 2, 12, 16).transpose(1, 2),
        torch.randn(()),
        torch.randn(12, 1, 16),
    ]
    for arrange, gradient in zip(arrangements, gradients, strict=True):
        check_convolution(kind, shape, 3, dtype, arrange=arrange, gradient=gradient)


@pytest.mark.parametrize("kind", ["head", "depthwise", "multihead"])
def test_only_what_is_needed(kind):
    x = torch.randn(1, 5, 2, 16)
    filters = torch.randn(filter_shape(kind, 2, 16, 3), requires_grad=True)
    y = backend.convolve(kind, x, filters, None, None)
    (df,) = torch.autograd.grad(y.square().sum(), filters)
    exact = filters.detach().double().requires_grad_()
    want = definition(kind, x.double(), exact, None)
    check((y, df), (want, torch.autograd.grad(want.square().sum(), exact)[0]), FP32)


@pytest.mark.parametrize("kind", ["head", "depthwise", "multihead"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_documents_are_isolated_bit_for_bit(kind, dtype):
    """What is before a border changes nothing after it, and the gradient of what is after it
    nothing before."""
    torch.manual_seed(0)
    filters = torch.randn(filter_shape(kind, 2, 16, 6)).to(dtype)
    positions = torch.cat([torch.arange(11), torch.arange(9)]).int()[None]
    x = torch.randn(1, 20, 2, 16).to(dtype)
    other = torch.cat([torch.randn(1, 11, 2, 16).to(dtype) * 1e4, x[:, 11:]], dim=1)
    results = []
    for inputs in (x, other):
        leaf = inputs.clone().requires_grad_()
        y = backend.convolve(kind, leaf, filters, None, positions)
        dy = torch.ones_like(y)
        dy[:, 11:] += inputs[:, :1]  # differs between the two after the border alone
        results.append((y[:, 11:], torch.autograd.grad(y, leaf, dy)[0][:, :11]))
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("kind", ["head", "depthwise"])
def test_sums_over_lags_do_not_read_across_borders(kind):
    filters = torch.randn(filter_shape(kind, 1, 16, 6))
    positions = torch.cat([torch.arange(3), torch.arange(5)]).int()[None]
    x = torch.full((1, 8, 1, 16), torch.nan)
    x[:, 3:] = 1.0
    y = backend.convolve(kind, x, filters, None, positions)
    assert y[:, :3].isnan().all() and y[:, 3:].isfinite().all()


# Packed queries, keys and values


def check_qkv(shape, window, dtype, streams="qkv", rotary=0, rows=1, documents=False, bias=True):
    batch, time, heads, width = shape
    torch.manual_seed(rotary)
    qkv = random(batch, time, heads, 3, width, dtype=dtype)
    filters = [random(heads, window, dtype=dtype) if s in streams else None for s in "qkv"]
    biases = random(heads, 3, width, dtype=dtype) if bias else None
    angles = torch.randn(rows, time, rotary)
    positions = uneven_positions(batch, time) if documents else None
    leaves = [leaf for leaf in (qkv, *filters, biases) if leaf is not None]
    gradients = [
        torch.randn(batch, time, heads, width),
        torch.randn(batch, heads, time, width).transpose(1, 2),
        torch.randn(1, time, 1, width).expand(shape),
    ]
    gradients = [gradient.to(dtype) for gradient in gradients]

    turn = (angles.cos(), angles.sin()) if rotary else None
    outputs = backend.head_conv_qkv(qkv, tuple(filters), biases, turn, positions)
    assert all(y.is_contiguous() for y in outputs)
    results = (*outputs, *torch.autograd.grad(outputs, leaves, gradients))

    exact = {id(leaf): leaf.detach().double().requires_grad_() for leaf in leaves}
    wanted = []
    for index, taps in enumerate(filters):
        y = exact[id(qkv)][:, :, :, index]
        if taps is not None:
            y = definition("head", y, exact[id(taps)], positions)
        if bias:
            y = y + exact[id(biases)][:, index]
        if rotary and index < 2:
            y = rotated(y, angles.double().cos(), angles.double().sin())
        wanted.append(y)
    dwanted = torch.autograd.grad(wanted, list(exact.values()), [g.double() for g in gradients])
    check(results, (*wanted, *dwanted), dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    "case",
    [
        {"shape": (2, 66, 2, 16), "window": 4, "rotary": 4, "rows": 2},
        {"shape": (1, 66, 1, 16), "window": 21, "rotary": 16, "documents": True, "streams": "qv"},
        {"shape": (1, 9, 1, 80), "window": 3, "rotary": 20, "streams": "v", "bias": False},
        # Rotated columns apart from the others, in their only chunk and in the first of two.
        {"shape": (1, 66, 1, 48), "window": 21, "rotary": 16, "documents": True},
        {"shape": (2, 3, 2, 80), "window": 3, "rotary": 10, "rows": 2},
        {"shape": (1, 5, 2, 16), "window": 8, "rotary": 0, "streams": "k"},
        {"shape": (1, 1, 1, 96), "window": 3, "rotary": 96},
        {"shape": (1, 3, 1, 16), "window": 1, "rotary": 8, "documents": True},
    ],
)
def test_qkv(dtype, case):
    check_qkv(dtype=dtype, **case)


@pytest.mark.parametrize("documents", [False, True])
def test_a_long_halo(documents, monkeypatch):
    """Products with the halo are summed in a second loop, and a kernel more turns what rotates."""
    from cat_lm.ops.convolution.triton import convolution, launch, qkv

    tiles = []

    def chosen(*arguments, rotary=0, **how):
        tiles.append(launch.choose_tile(*arguments, rotary=rotary, **how))
        assert tiles[-1].halo == 128 and rotary == 0
        return tiles[-1]

    for module in (convolution, qkv):
        monkeypatch.setattr(module, "choose_tile", chosen)
    check_qkv((1, 140, 1, 48), 100, BF16, streams="q", rotary=16, documents=documents)
    assert len(tiles) == 2
    expanded = torch.randn(140, 1, 48) if documents else torch.randn(())
    how = {"rotary": 16, "gradient": expanded}
    check_convolution("head", (1, 140, 1, 48), 100, BF16, documents, **how)
    assert len(tiles) == 4


def test_a_long_halo_without_angles():
    """Angles of no channel rotate nothing, in any kernel."""
    x, nothing = torch.randn(1, 9, 1, 16).to(BF16), torch.randn(1, 9, 0)
    for kind in ("head", "multihead"):
        filters = torch.randn(filter_shape(kind, 1, 16, 100)).to(BF16)
        plain = backend.convolve(kind, x, filters, None, None)
        assert torch.equal(
            backend.convolve(kind, x, filters, None, None, (nothing, nothing)), plain
        )


def test_qkv_of_strided_inputs():
    """The gradient of a sum is expanded; the projection may be a slice of something larger."""
    qkv = torch.randn(1, 4, 2, 3, 40)[..., 8:24].requires_grad_()
    filters = torch.randn(2, 3)
    outputs = backend.head_conv_qkv(qkv, (filters, None, filters), None, None, None)
    (gradient,) = torch.autograd.grad(sum(y.sum() for y in outputs), qkv)
    exact = qkv.detach().double().requires_grad_()
    wanted = [definition("head", exact[:, :, :, s], filters.double(), None) for s in (0, 2)]
    wanted.insert(1, exact[:, :, :, 1])
    (dwanted,) = torch.autograd.grad(sum(y.sum() for y in wanted), exact)
    check((*outputs, gradient), (*wanted, dwanted), FP32)


# Operators of torch


def small_arguments(kind: str) -> tuple:
    x = torch.randn(1, 4, 2, 16, requires_grad=True)
    filters = torch.randn(filter_shape(kind, 2, 16, 3), requires_grad=True)
    bias, angles = torch.randn(2, 16, requires_grad=True), torch.randn(2, 1, 4, 8)
    return x, filters, bias, uneven_positions(1, 4), *angles.unbind()


def test_operators_keep_the_rules():
    """Schema, autograd registration, fake results and ahead-of-time traces agree with the real."""
    for kind, operator in (("head", conv), ("depthwise", conv), ("multihead", multihead_conv)):
        x, filters, bias, positions, *angles = small_arguments(kind)
        torch.library.opcheck(operator, (x, filters, bias, positions, *angles))
        plain = [x.detach(), filters.detach(), positions]
        dy = torch.randn_like(x)
        if kind == "multihead":
            torch.library.opcheck(multihead_conv_dx, (dy, *plain[1:]))
            torch.library.opcheck(multihead_conv_df, (dy, plain[0], 3, positions))
        else:
            torch.library.opcheck(conv_backward, (dy, *plain, *angles, True, True, True))
            torch.library.opcheck(conv_backward, (dy, *plain, None, None, False, True, False))
    torch.library.opcheck(rotation.rotate, (x, *angles, False))


def test_packed_operators_keep_the_rules():
    qkv = torch.randn(1, 4, 2, 3, 16, requires_grad=True)
    taps = torch.randn(2, 3, requires_grad=True)
    bias = torch.randn(2, 3, 16, requires_grad=True)
    cos, sin = torch.randn(2, 1, 4, 8)
    torch.library.opcheck(conv_qkv, (qkv, taps, None, taps, bias, cos, sin, None))
    dy = torch.randn(1, 4, 2, 16)
    saved = (qkv.detach(), taps.detach(), None, None, cos, sin, None)
    torch.library.opcheck(conv_qkv_backward, (dy, dy + 1, dy + 2, *saved, True, True, True))


@pytest.mark.parametrize("kind", ["head", "multihead"])
def test_compiled_without_a_graph_break(kind):
    def loss(x, filters, bias, positions, *turn):
        return backend.convolve(kind, 2 * x, filters, bias, positions, turn).square().sum()

    arguments = small_arguments(kind)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for function in (loss, compiled):
        arguments[0].grad = None
        function(*arguments).backward()
        if function is loss:
            wanted = arguments[0].grad
    torch.testing.assert_close(arguments[0].grad, wanted)
    assert torch.equal(compiled(*arguments), loss(*arguments))


@pytest.mark.parametrize("kind", ["head", "depthwise", "multihead", "rotated"])
def test_stacked_equals_a_loop(kind):
    """Under torch.vmap, forward, backward, and the backward operator itself under vmap."""
    torch.manual_seed(0)
    turn = torch.randn(2, 1, 4, 8).unbind() if kind == "rotated" else None
    kind = "multihead" if kind == "rotated" else kind
    leaves = [
        torch.randn(3, *shape, requires_grad=True)
        for shape in ((1, 4, 2, 16), filter_shape(kind, 2, 16, 3), (2, 16))
    ]

    def convolve(x, filters, bias):
        return backend.convolve(kind, x, filters, bias, None, turn)

    y = torch.vmap(convolve)(*leaves)
    wanted = torch.stack([convolve(*parts) for parts in zip(*leaves, strict=True)])
    torch.testing.assert_close(y, wanted)
    dy = torch.randn_like(y)
    found, right = (torch.autograd.grad(output, leaves, dy) for output in (y, wanted))
    torch.testing.assert_close(found, right)
    single = [leaf.detach()[0].requires_grad_() for leaf in leaves]
    y = convolve(*single)
    many = torch.autograd.grad(y, single, dy, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        right = torch.autograd.grad(y, single, dy[i], retain_graph=True)
        torch.testing.assert_close(tuple(gradient[i] for gradient in many), right)


def test_packed_compiled_without_a_graph_break():
    def loss(qkv, taps, bias, cos, sin):
        return sum(
            y.square().sum()
            for y in backend.head_conv_qkv(qkv, (taps, None, taps), bias, (cos, sin), None)
        )

    torch.manual_seed(0)
    leaves = [torch.randn(s, requires_grad=True) for s in ((1, 4, 2, 3, 16), (2, 3), (2, 3, 16))]
    angles = torch.randn(2, 1, 4, 8).unbind()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    wanted = torch.autograd.grad(loss(*leaves, *angles), leaves)
    for gradient, want in zip(
        torch.autograd.grad(compiled(*leaves, *angles), leaves), wanted, strict=True
    ):
        torch.testing.assert_close(gradient, want)


def test_serves_cpu_tensors_in_the_interpreter():
    device = torch.device("cpu")
    assert backend.why_not("head", device, BF16, 21, 2, 64) is None
    assert "float64" in backend.why_not("head", device, torch.float64, 21, 2, 64)
    assert "interpreter" in backend.describe("head", BF16, 21)


def test_the_trial_kernel_runs_and_is_compared(monkeypatch):
    cpu = torch.device("cpu")
    assert why_no_kernel(cpu) is None
    monkeypatch.setattr(backend, "convolve", lambda kind, x, *_: x.clone())
    assert why_no_kernel(cpu) == "a Triton kernel runs and computes wrong numbers on this device"
