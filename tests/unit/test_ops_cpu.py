"""The CPU backend against loops over the definitions in fp64, with and without a compiler."""

from __future__ import annotations

import functools
import multiprocessing

import pytest
import torch

from cat_lm.ops.convolution import cpu
from cat_lm.ops.convolution.cpu import kernel, operators, toeplitz
from tests.unit.naive_convolution import filter_shape, naive_convolution

CASES = [  # a kind of convolution, computed by
    ("head", "kernel"),
    ("head", "torch"),
    ("depthwise", "kernel"),
    ("depthwise", "torch"),
    ("multihead", "kernel"),
    ("multihead", "torch"),
]
SHAPES = [  # B, T, H, D, W
    (1, 1, 1, 1, 1),
    (2, 1, 3, 4, 5),
    (1, 7, 2, 3, 1),
    (2, 3, 2, 2, 8),
    (2, 32, 2, 4, 3),
    (2, 67, 2, 5, 21),
    (1, 140, 1, 2, 128),
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}


@pytest.fixture(params=CASES, ids="-".join)
def conv_type(request, monkeypatch):
    """A kind of convolution, with what computes it forced."""
    name, path = request.param
    if path == "torch":
        monkeypatch.setattr(operators, "load_kernel", lambda: None)
    elif kernel.load_kernel() is None:
        pytest.skip(cpu.describe(name, torch.float32, 4))
    return name


def draw(conv_type, shape, dtype=torch.float64, seed=0):
    """x, filters and bias that require gradients."""
    batch, time, heads, width, window = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = (
        (batch, time, heads, width),
        filter_shape(conv_type, heads, width, window),
        (heads, width),
    )
    return [
        torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for size in sizes
    ]


def draw_documents(batch, time, seed=0):
    """Ids of runs of uneven lengths, and positions."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.rand(batch, time, generator=generator) < 0.12
    starts[:, 0] = True
    steps = torch.arange(time).expand(batch, time)
    positions = steps - torch.where(starts, steps, 0).cummax(dim=1).values
    return starts.cumsum(dim=1), positions.int()


def gradients(y, tensors, dy):
    return torch.autograd.grad(y, tensors, dy, retain_graph=True)


@functools.cache
def defined(conv_type, shape, packed):
    """(tensors, positions, dy, y, gradients): a case by its definition, once for all that computes
    it."""
    tensors = draw(conv_type, shape)
    ids, positions = draw_documents(*shape[:2]) if packed else (None, None)
    y = naive_convolution(conv_type, *tensors, ids)
    dy = torch.randn(y.shape, dtype=torch.float64)
    return tensors, positions, dy, y.detach(), gradients(y, tensors, dy)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_definition(conv_type, shape, packed):
    tensors, positions, dy, expected, expected_gradients = defined(conv_type, shape, packed)
    y = cpu.convolve(conv_type, *tensors, positions)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradients(y, tensors, dy), expected_gradients, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("width", [16, 80, 128, 200])
def test_wide_heads_and_several_blocks(conv_type, width):
    """Columns of a head, blocks of time and segments of blocks that end anywhere."""
    case = defined(conv_type, (3, 150, 2, width, 4), True)
    tensors, positions, dy, expected, expected_gradients = case
    y = cpu.convolve(conv_type, *tensors, positions)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(gradients(y, tensors, dy), expected_gradients)


def test_gradcheck(conv_type):
    tensors = draw(conv_type, (2, 20, 2, 2, 5))
    _, positions = draw_documents(2, 20)
    call = lambda *given: cpu.convolve(conv_type, *given, positions)  # noqa: E731
    assert torch.autograd.gradcheck(call, tensors, fast_mode=True)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
def test_gradients_of_some_arguments(conv_type, wanted):
    tensors = draw(conv_type, (2, 30, 2, 4, 5))
    dy = torch.randn(2, 30, 2, 4, dtype=torch.float64)
    every = gradients(cpu.convolve(conv_type, *tensors, None), tensors, dy)
    given = [tensor if index in wanted else tensor.detach() for index, tensor in enumerate(tensors)]
    y = cpu.convolve(conv_type, *given, None)
    found = gradients(y, [tensors[index] for index in wanted], dy)
    torch.testing.assert_close(found, tuple(every[index] for index in wanted))


def test_no_bias(conv_type):
    x, filters, _ = draw(conv_type, (2, 30, 2, 4, 5))
    y, expected = (
        cpu.convolve(conv_type, x, filters, None, None),
        naive_convolution(conv_type, x, filters),
    )
    dy = torch.randn(y.shape, dtype=torch.float64)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(
        gradients(y, (x, filters), dy), gradients(expected, (x, filters), dy)
    )


def test_any_strides(conv_type):
    """Inputs that are views, and gradients that are transposed, expanded or sliced."""
    _, filters, bias = draw(conv_type, (2, 11, 3, 4, 4))
    storage = torch.randn(6, 4, 2, 2, 11, dtype=torch.float64)
    packed = torch.randn(2, 11, 3, 3, 4, dtype=torch.float64)
    views = [
        storage[:, :, 0].permute(2, 3, 0, 1)[:, :, ::2],  # channels far apart
        packed[:, :, :, 1],  # one stream of a packed projection
        torch.randn(1, 11, 1, 4, dtype=torch.float64).expand(2, 11, 3, 4),
    ]
    cotangents = [
        torch.randn(3, 11, 2, 4, dtype=torch.float64).permute(2, 1, 0, 3),
        torch.ones((), dtype=torch.float64).expand(2, 11, 3, 4),
        torch.randn(1, 1, 1, 4, dtype=torch.float64).expand(2, 11, 3, 4),
        torch.randn(2, 11, 3, 8, dtype=torch.float64)[..., ::2],
    ]
    for view in views:
        tensors = [view.detach().requires_grad_(), filters, bias]
        y = cpu.convolve(conv_type, *tensors, None)
        expected = naive_convolution(conv_type, *tensors)
        torch.testing.assert_close(y, expected)
        for dy in cotangents:
            torch.testing.assert_close(gradients(y, tensors, dy), gradients(expected, tensors, dy))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_lower_precision(conv_type, dtype):
    tensors = draw(conv_type, (2, 70, 2, 8, 9), dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    y, expected = cpu.convolve(conv_type, *tensors, None), naive_convolution(conv_type, *exact)
    dy = torch.randn(y.shape).to(dtype)
    pairs = zip(
        (y, *gradients(y, tensors, dy)),
        (expected, *gradients(expected, exact, dy.double())),
        strict=True,
    )
    for found, right in pairs:
        assert found.dtype == dtype
        assert (found - right).abs().max() <= TOLERANCE[dtype] * right.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_of_every_number(dtype):
    """The kernel's conversions are torch's, for all 2^16 numbers and for what lies between."""
    if kernel.load_kernel() is None:
        pytest.skip(cpu.describe("head", dtype, 1))
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(dtype)
    one = torch.ones(1, 1, dtype=dtype)
    same = cpu.convolve("head", numbers.view(1, -1, 1, 64), one, None, None).flatten()
    torch.testing.assert_close(same, numbers, rtol=0, atol=0, equal_nan=True)
    # x + bias is exact in fp32 for many pairs, halfway cases among them, and rounded once.
    bias = torch.tensor([[2.0**-9, 3 * 2.0**-12, 1.0, 2.0**-25]], dtype=dtype)
    finite = numbers[numbers.isfinite()]
    x = finite[: finite.numel() // 4 * 4].view(1, -1, 1, 4)
    y = cpu.convolve("head", x, one, bias, None)
    expected = (x.float() + bias.float()).to(dtype)
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_documents_are_isolated_bit_for_bit(conv_type, dtype):
    x, filters, bias = (tensor.detach() for tensor in draw(conv_type, (1, 90, 2, 4, 21), dtype))
    positions = torch.cat([torch.arange(41), torch.arange(49)]).int()[None]
    changed = x.clone()
    changed[:, :41] = torch.randn(1, 41, 2, 4).to(dtype)
    y, again = (cpu.convolve(conv_type, given, filters, bias, positions) for given in (x, changed))
    assert torch.equal(y[:, 41:], again[:, 41:])
    assert not torch.equal(y[:, :41], again[:, :41])


def test_future_changes_nothing(conv_type):
    x, filters, bias = (tensor.detach() for tensor in draw(conv_type, (1, 90, 2, 4, 21)))
    changed = x.clone()
    changed[:, 50:] += 1e3
    y, again = (cpu.convolve(conv_type, given, filters, bias, None) for given in (x, changed))
    assert torch.equal(y[:, :50], again[:, :50])
    assert not torch.equal(y[:, 50:], again[:, 50:])


@pytest.fixture
def two_threads():
    """A worker of the tests has one, which has nothing to be different about."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["head", "depthwise", "multihead"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_do_not_depend_on_threads(name, dtype):
    tensors = draw(name, (3, 700, 3, 80, 21), dtype)
    _, positions = draw_documents(3, 700)
    dy = torch.randn(3, 700, 3, 80).to(dtype)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5, 1):
            torch.set_num_threads(threads)
            y = cpu.convolve(name, *tensors, positions)
            found.append((y, *gradients(y, tensors, dy)))
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


def test_gradients_are_the_same_in_every_run(conv_type, two_threads):
    tensors = draw(conv_type, (4, 200, 4, 8, 21), torch.float32)
    dy = torch.randn(4, 200, 4, 8)
    runs = [gradients(cpu.convolve(conv_type, *tensors, None), tensors, dy) for _ in range(3)]
    for others in runs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(runs[0], others, strict=True))


def _convolve_in_child(arguments, queue):
    torch.set_num_threads(2)
    y = cpu.convolve("head", *arguments, None)
    torch.set_num_threads(1)  # for torch's own sum, which waits for the parent's threads forever
    queue.put(float(y.sum()))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_computes_with_threads():
    """OpenMP's threads do not exist in a child, whose kernel must not wait for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        arguments = [tensor.detach() for tensor in draw("head", (2, 500, 4, 64, 21))]
        expected = float(cpu.convolve("head", *arguments, None).sum())
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=_convolve_in_child, args=(arguments, queue), daemon=True)
        child.start()
        assert queue.get(timeout=60) == pytest.approx(expected)
        child.join(timeout=60)
        assert child.exitcode == 0
    finally:
        torch.set_num_threads(before)


def test_operator_registration(conv_type):
    """Fake tensors, autograd and schema, as torch.compile needs them."""
    tensors = draw(conv_type, (2, 40, 2, 4, 5), torch.float32)
    _, positions = draw_documents(2, 40)
    for given in (positions, None):
        torch.library.opcheck(operators.cpu_conv, (conv_type, *tensors, given))


def test_compiles_into_one_graph(conv_type):
    tensors = draw(conv_type, (2, 40, 2, 4, 5), torch.float32)
    _, positions = draw_documents(2, 40)

    def call(x, filters, bias):
        return cpu.convolve(conv_type, x * 2, filters, bias, positions).sin()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    y, expected = compiled(*tensors), call(*tensors)
    torch.testing.assert_close(y, expected)
    dy = torch.randn(y.shape)
    found, right = (torch.autograd.grad(output, tensors, dy) for output in (y, expected))
    torch.testing.assert_close(found, right)


def test_toeplitz_matrix_and_its_transpose():
    filters = torch.tensor([[1.0, 2.0, 3.0]])
    expected = torch.tensor([[3.0, 2, 1, 0, 0], [0, 3, 2, 1, 0], [0, 0, 3, 2, 1]])
    assert torch.equal(toeplitz.banded_toeplitz(filters, 3)[0], expected)
    matrix = torch.randn(2, 6, 8, dtype=torch.float64)
    filters = torch.randn(2, 3, dtype=torch.float64)
    dot = (toeplitz.banded_toeplitz(filters, 6) * matrix).sum()
    torch.testing.assert_close(dot, (filters * toeplitz.sum_of_diagonals(matrix, 3)).sum())


def test_what_it_serves():
    cpu_device, other = torch.device("cpu"), torch.device("cuda")
    assert cpu.why_not(cpu_device, torch.bfloat16) is None
    assert "not cuda" in cpu.why_not(other, torch.bfloat16)
    assert "float8" in cpu.why_not(cpu_device, torch.float8_e4m3fn)
    assert kernel.library().reason in cpu.describe("head", torch.float32, 21)
