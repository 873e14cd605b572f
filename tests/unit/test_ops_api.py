"""The convolutions' public functions: shapes, documents, state, choice of backend, errors."""

import pytest
import torch

from cat_lm.ops import (
    BACKENDS,
    choose_backend,
    depthwise_conv,
    head_conv,
    head_conv_qkv,
    multihead_conv,
    rotate,
)
from tests.unit.naive_convolution import filter_shape, naive_convolution

CONVOLUTIONS = {"head": head_conv, "depthwise": depthwise_conv, "multihead": multihead_conv}
TYPES = list(CONVOLUTIONS)


def _tensors(conv_type, batch=2, time=9, heads=3, width=4, window=3, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = draw(batch, time, heads, width)
    return x, draw(*filter_shape(conv_type, heads, width, window)), draw(heads, width)


@pytest.mark.parametrize("backend", ["auto", "reference", "cpu"])
@pytest.mark.parametrize("window", [1, 2, 3, 9, 12])
@pytest.mark.parametrize("conv_type", TYPES)
def test_equals_the_loop(conv_type, window, backend):
    x, filters, bias = _tensors(conv_type, window=window)
    y = CONVOLUTIONS[conv_type](x, filters, bias, backend=backend)
    torch.testing.assert_close(y, naive_convolution(conv_type, x, filters, bias))


@pytest.mark.parametrize("conv_type", TYPES)
def test_one_token(conv_type):
    x, filters, bias = _tensors(conv_type, batch=1, time=1, window=5)
    y = CONVOLUTIONS[conv_type](x, filters, bias)
    torch.testing.assert_close(y, naive_convolution(conv_type, x, filters, bias))


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 0, 0, 2, 2], [7, 7, 7, 7, 7, 7, 7, 7, 3]])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("conv_type", TYPES)
def test_documents_by_ids_and_by_lengths(conv_type, backend):
    x, filters, bias = _tensors(conv_type, window=4)
    convolve = CONVOLUTIONS[conv_type]
    expected = naive_convolution(conv_type, x, filters, bias, DOCUMENTS)
    by_ids = convolve(x, filters, bias, document_ids=DOCUMENTS, backend=backend)
    torch.testing.assert_close(by_ids, expected)
    # The rows joined end to end; an empty document, and no border at the end of the first row.
    borders = torch.tensor([0, 3, 5, 5, 7, 17, 18], dtype=torch.int32)
    by_lengths = convolve(x, filters, bias, cu_seqlens=borders, backend=backend)
    torch.testing.assert_close(by_lengths, expected)


@pytest.mark.parametrize("conv_type", TYPES)
def test_lengths_may_run_over_the_end_of_a_row(conv_type):
    x, filters, bias = _tensors(conv_type, window=4)
    y = CONVOLUTIONS[conv_type](x, filters, bias, cu_seqlens=torch.tensor([0, 4, 12, 18]))
    documents = torch.tensor([[0] * 4 + [1] * 5, [1] * 3 + [2] * 6])
    torch.testing.assert_close(y, naive_convolution(conv_type, x, filters, bias, documents))


@pytest.mark.parametrize("cuts", [[4], [1, 2, 3], [1] * 8, [6, 1]])
@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("conv_type", TYPES)
def test_parts_with_a_state_equal_the_whole(conv_type, window, cuts):
    x, filters, bias = _tensors(conv_type, window=window)
    convolve = CONVOLUTIONS[conv_type]
    whole, last = convolve(x, filters, bias, return_state=True)
    state, outputs = None, []
    for part in x.split([*cuts, x.shape[1] - sum(cuts)], dim=1):
        y, state = convolve(part, filters, bias, initial_state=state, return_state=True)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole)
    torch.testing.assert_close(state, last)
    assert state.shape == (2, window - 1, 3, 4)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("time", [1, 2, 6])
@pytest.mark.parametrize("conv_type", TYPES)
def test_gradients_reach_inputs_filters_bias_and_state(conv_type, time, backend):
    x, filters, bias = _tensors(conv_type, time=time, heads=2, width=2, window=4)
    state = torch.randn(2, 3, 2, 2, dtype=torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (x, filters, bias, state)]

    def outputs(x, filters, bias, state):
        return CONVOLUTIONS[conv_type](
            x, filters, bias, initial_state=state, return_state=True, backend=backend
        )

    torch.autograd.gradcheck(outputs, leaves)


@pytest.mark.parametrize("conv_type", TYPES)
def test_gradients_within_documents(conv_type):
    x, filters, bias = _tensors(conv_type, heads=2, width=2, window=4)
    leaves = [tensor.requires_grad_() for tensor in (x, filters, bias)]

    def outputs(x, filters, bias):
        return CONVOLUTIONS[conv_type](x, filters, bias, document_ids=DOCUMENTS)

    torch.autograd.gradcheck(outputs, leaves)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("conv_type", TYPES)
def test_a_strange_value_stays_in_its_document(conv_type, backend):
    x, filters, bias = (tensor.float() for tensor in _tensors(conv_type, window=4))
    convolve = CONVOLUTIONS[conv_type]
    before = convolve(x, filters, bias, document_ids=DOCUMENTS, backend=backend)
    x[0, 4] = 1e30
    after = convolve(x, filters, bias, document_ids=DOCUMENTS, backend=backend)
    assert torch.equal(before[0, 5:], after[0, 5:])
    assert torch.equal(before[0, :4], after[0, :4])
    assert not torch.equal(before[0, 4], after[0, 4])


@pytest.mark.parametrize("conv_type", TYPES)
def test_half_precision_sums_in_fp32(conv_type):
    x, filters, bias = _tensors(conv_type, time=64, heads=2, width=8, window=21)
    half = [tensor.bfloat16() for tensor in (x, filters, bias)]
    y = CONVOLUTIONS[conv_type](*half)
    assert y.dtype == torch.bfloat16
    exact = naive_convolution(conv_type, *half)
    # One rounding of the result: 8 bits of mantissa. Sums in bf16 would be off by several.
    error = (y.double() - exact).abs() / exact.abs().clamp(min=1.0)
    assert error.max() < 2**-8


@pytest.mark.parametrize("conv_type", TYPES)
def test_no_graph_break(conv_type):
    x, filters, bias = (tensor.float() for tensor in _tensors(conv_type, time=16))
    documents = torch.arange(16).expand(2, -1) // 5

    def outputs(x, filters, bias, documents):
        return CONVOLUTIONS[conv_type](x, filters, bias, document_ids=documents)

    compiled = torch.compile(outputs, fullgraph=True, backend="aot_eager")
    filters.requires_grad_()
    y = compiled(x, filters, bias, documents)
    torch.testing.assert_close(y, outputs(x, filters, bias, documents))
    y.sum().backward()
    assert filters.grad.isfinite().all()


def test_choice_of_a_backend():
    shape = {"dtype": torch.float32, "window": 21, "heads": 8, "head_dim": 64}
    choice = choose_backend("head", device="cpu", **shape)
    assert choice.name == "cpu" and "cpu" in choice.reason
    assert choose_backend("head", device="cpu", backend="reference", **shape).name == "reference"
    # A device without a fast path is served, and the reason says why slowly.
    choice = choose_backend("head", device="meta", **shape)
    assert choice.name == "reference" and "triton cannot serve" in choice.reason
    with pytest.raises(ValueError, match=r"backend='cpu' cannot serve this convolution: .*meta"):
        choose_backend("head", device="meta", backend="cpu", **shape)
    with pytest.raises(ValueError, match="must be one of auto, reference, cpu, triton"):
        choose_backend("head", device="cpu", backend="toeplitz", **shape)
    for dtype in (torch.int64, torch.float8_e4m3fn, torch.complex64):
        with pytest.raises(ValueError, match=f"{dtype} cannot be convolved; use one of float32"):
            choose_backend("head", device="cpu", **(shape | {"dtype": dtype}))
    with pytest.raises(ValueError, match="window=0"):
        choose_backend("head", device="cpu", **(shape | {"window": 0}))
    with pytest.raises(ValueError, match="must be one of none, head, depthwise, multihead"):
        choose_backend("heads", device="cpu", **shape)


def test_every_backend_describes_itself():
    for name in BACKENDS.names():
        assert isinstance(BACKENDS.get(name).describe("head", torch.float32, 21), str)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"filters": (2, 3)}, r"filters must be \[3, W\]"),
        ({"filters": (3, 0)}, r"W >= 1"),
        ({"filters": (3, 4, 3)}, r"filters must be \[3, W\]"),
        ({"bias": (3,)}, r"bias must be \[3, 4\]"),
        ({"document_ids": (2, 8)}, r"document_ids must be \[2, 9\]"),
        ({"initial_state": (2, 3, 3, 4)}, r"initial_state must be \[2, 2, 3, 4\]"),
    ],
)
def test_shapes_that_do_not_fit(arguments, message):
    given = {name: torch.zeros(shape) for name, shape in arguments.items()}
    given = {"x": torch.zeros(2, 9, 3, 4), "filters": torch.zeros(3, 3)} | given
    with pytest.raises(ValueError, match=message):
        head_conv(**given)


@pytest.mark.parametrize("shape", [(0, 9, 3, 4), (2, 0, 3, 4), (2, 9, 12)])
def test_inputs_that_are_empty_or_flat(shape):
    with pytest.raises(ValueError, match="not empty"):
        head_conv(torch.zeros(shape), torch.zeros(3, 3))


@pytest.mark.parametrize(
    ("borders", "message"),
    [
        ([0, 9], "rise from 0 to 18"),
        ([3, 18], "rise from 0 to 18"),
        ([0, 7, 5, 18], "rise from 0 to 18"),
        ([[0, 18]], r"\[documents \+ 1\] integers"),
        ([0.0, 18.0], r"\[documents \+ 1\] integers"),
    ],
)
def test_lengths_that_do_not_fit(borders, message):
    with pytest.raises(ValueError, match=message):
        head_conv(torch.zeros(2, 9, 3, 4), torch.zeros(3, 3), cu_seqlens=torch.tensor(borders))


def test_documents_are_numbered_with_integers():
    with pytest.raises(ValueError, match=r"\[2, 9\] integers, not \[2, 9\] torch.float32"):
        head_conv(torch.zeros(2, 9, 3, 4), torch.zeros(3, 3), document_ids=torch.zeros(2, 9))


def test_documents_exclude_a_state_and_each_other():
    x, filters = torch.zeros(1, 4, 3, 4), torch.zeros(3, 3)
    ids, borders = torch.zeros(1, 4, dtype=torch.long), torch.tensor([0, 4])
    for packed in ({"document_ids": ids}, {"cu_seqlens": borders}):
        with pytest.raises(ValueError, match="together with a state"):
            head_conv(x, filters, return_state=True, **packed)
        with pytest.raises(ValueError, match="together with a state"):
            head_conv(x, filters, initial_state=torch.zeros(1, 2, 3, 4), **packed)
    with pytest.raises(ValueError, match="not both"):
        head_conv(x, filters, document_ids=ids, cu_seqlens=borders)


def _angles(time, width, batch=1):
    frequencies = 100.0 ** (-torch.arange(0, width, 2).double() / width)
    angles = torch.arange(time).double()[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1).expand(batch, -1, -1)
    return angles.cos(), angles.sin()


def test_rotation_turns_pairs_of_channels_by_position():
    x = torch.randn(1, 7, 2, 6, dtype=torch.float64)
    cosines, sines = _angles(7, 4)
    y = rotate(x, cosines, sines)
    as_complex = torch.complex(x[..., :2], x[..., 2:4])
    turned = as_complex * torch.complex(cosines[..., :2], sines[..., :2])[:, :, None]
    torch.testing.assert_close(y[..., :2], turned.real)
    torch.testing.assert_close(y[..., 2:4], turned.imag)
    assert torch.equal(y[..., 4:], x[..., 4:])


@pytest.mark.parametrize("streams", ["q", "k", "v", "qk", "kv", "qv", "qkv"])
@pytest.mark.parametrize("rotated", [0, 4, 6])
def test_packed_projection_is_convolved_then_rotated(streams, rotated):
    qkv = torch.randn(2, 9, 3, 3, 6, dtype=torch.float64)
    filters = [torch.randn(3, 4, dtype=torch.float64) if s in streams else None for s in "qkv"]
    bias = torch.randn(3, 3, 6, dtype=torch.float64)
    rotary = _angles(9, rotated) if rotated else None
    outputs = head_conv_qkv(qkv, filters, bias, rotary=rotary, document_ids=DOCUMENTS)
    for index, (taps, y) in enumerate(zip(filters, outputs, strict=True)):
        taps = torch.ones(3, 1, dtype=torch.float64) if taps is None else taps
        expected = naive_convolution("head", qkv[:, :, :, index], taps, bias[:, index], DOCUMENTS)
        if rotary is not None and index < 2:
            expected = rotate(expected, *rotary)
        torch.testing.assert_close(y, expected)


def test_packed_projection_with_a_state():
    qkv = torch.randn(2, 9, 3, 3, 6, dtype=torch.float64)
    filters = [torch.randn(3, 4, dtype=torch.float64), None, torch.randn(3, 4).double()]
    whole = head_conv_qkv(qkv, filters)
    state = qkv[:, 2:5, :, ::2]
    for y, part in zip(whole, head_conv_qkv(qkv[:, 5:], filters, initial_state=state), strict=True):
        torch.testing.assert_close(part, y[:, 5:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": torch.zeros(2, 9, 3, 2, 6)}, r"qkv must be \[B, T, H, 3, D\]"),
        ({"filters": (None, None, None)}, "at least one not None"),
        ({"filters": (torch.zeros(3, 2), torch.zeros(3, 3), None)}, r"windows \[2, 3\]"),
        ({"bias": torch.zeros(3, 6)}, r"bias must be \[3, 3, 6\]"),
        ({"initial_state": torch.zeros(2, 2, 3, 3, 6)}, r"initial_state must be \[2, 2, 3, 1, 6\]"),
        ({"rotary": _angles(8, 4)}, r"rotary must be .*\[2 or 1, 9, R\]"),
        ({"rotary": _angles(9, 8)}, "at most 6"),
        ({"backend": "fastest"}, "must be one of auto"),
    ],
)
def test_packed_projections_that_do_not_fit(change, message):
    arguments = {"qkv": torch.zeros(2, 9, 3, 3, 6), "filters": (torch.zeros(3, 3), None, None)}
    with pytest.raises(ValueError, match=message):
        head_conv_qkv(**(arguments | change))
