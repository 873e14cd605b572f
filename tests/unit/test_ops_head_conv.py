"""The head convolution: every backend against a loop over the definition in fp64."""

import pytest
import torch

from cat_lm.ops import BACKENDS, choose_backend, head_conv
from cat_lm.ops.documents import document_positions, document_runs
from cat_lm.ops.toeplitz import banded_toeplitz, sum_of_diagonals

SHAPES = [  # B, T, H, D, W
    (1, 1, 1, 1, 1),
    (2, 1, 3, 4, 5),
    (1, 7, 2, 3, 1),
    (2, 3, 2, 2, 8),
    (2, 32, 2, 4, 3),
    (3, 33, 2, 4, 21),
    (1, 100, 3, 5, 21),
    (2, 70, 1, 2, 64),
    (1, 300, 2, 2, 128),
]


def naive(x, filters, bias=None, document_ids=None):
    """The definition, one product at a time."""
    ids = torch.zeros(x.shape[:2]) if document_ids is None else document_ids
    outputs = []
    for t in range(x.shape[1]):
        lags = range(min(filters.shape[1], t + 1))
        spans = (ids[:, t - lag : t + 1] for lag in lags)
        same = torch.stack([(span == span[:, :1]).all(1) for span in spans])[..., None, None]
        products = torch.stack([filters[:, lag, None] * x[:, t - lag] for lag in lags])
        outputs.append((products * same).sum(0))
    y = torch.stack(outputs, dim=1)
    return y if bias is None else y + bias


def inputs(shape, dtype=torch.float64, seed=0):
    batch, time, heads, width, window = shape
    generator = torch.Generator().manual_seed(seed)
    make = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    return make(batch, time, heads, width), make(heads, window), make(heads, width)


def documents(batch, time, seed=0):
    """Documents of uneven lengths; ids alternate 0, 1, so an id comes back."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.rand(batch, time, generator=generator) < 0.15
    return starts.cumsum(1) % 2


def gradients(y, tensors, dy):
    return torch.autograd.grad(y, tensors, dy)


@pytest.mark.parametrize("backend", BACKENDS["head"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_matches_the_definition(shape, backend, packed):
    x, filters, bias = (tensor.requires_grad_() for tensor in inputs(shape))
    ids = documents(*shape[:2]) if packed else None
    y = head_conv(x, filters, bias, document_ids=ids, backend=backend)
    expected = naive(x, filters, bias, ids)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)

    dy = torch.randn(x.shape, dtype=torch.float64)
    for name, ours, theirs in zip(
        ("x", "filters", "bias"),
        gradients(y, (x, filters, bias), dy),
        gradients(expected, (x, filters, bias), dy),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, msg=f"gradient of {name}")


@pytest.mark.parametrize("backend", BACKENDS["head"])
def test_gradcheck(backend):
    x, filters, bias = (tensor.requires_grad_() for tensor in inputs((2, 40, 2, 2, 5)))
    call = lambda *tensors: head_conv(*tensors, backend=backend)  # noqa: E731
    assert torch.autograd.gradcheck(call, (x, filters, bias), fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS["head"])
def test_any_strides(backend):
    """Inputs that are views, and gradients that are transposed, expanded or sliced."""
    x, filters, bias = inputs((2, 45, 6, 4, 7))
    view = x.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2)[:, :, ::2].requires_grad_()
    filters, bias = filters[::2].clone().requires_grad_(), bias[::2]
    assert not view.is_contiguous()
    y = head_conv(view, filters, bias, backend=backend)
    expected = naive(view, filters, bias)
    torch.testing.assert_close(y, expected)
    cotangents = [
        torch.randn(3, 45, 2, 4, dtype=y.dtype).permute(2, 1, 0, 3),
        torch.randn(1, 1, 1, 4, dtype=y.dtype).expand_as(y),
        torch.randn(2, 45, 3, 8, dtype=y.dtype)[..., ::2],
    ]
    for dy in cotangents:
        for ours, theirs in zip(
            torch.autograd.grad(y, (view, filters), dy, retain_graph=True),
            torch.autograd.grad(expected, (view, filters), dy, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("backend", BACKENDS["head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(backend, dtype):
    x, filters, bias = (tensor.requires_grad_() for tensor in inputs((2, 100, 3, 8, 21), dtype))
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, filters, bias)]
    y, expected = head_conv(x, filters, bias, backend=backend), naive(*exact)
    assert y.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    dy = torch.randn(x.shape).to(dtype)
    pairs = zip(
        (y, *gradients(y, (x, filters, bias), dy)),
        (expected, *gradients(expected, exact, dy.double())),
        strict=True,
    )
    for ours, theirs in pairs:
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize("backend", BACKENDS["head"])
def test_filters_follow_the_inputs_dtype(backend):
    """Under autocast the inputs are bf16 and the filters fp32; gradients come back in fp32."""
    x, filters, _ = inputs((1, 50, 2, 4, 5), torch.float32)
    filters.requires_grad_()
    y = head_conv(x.bfloat16(), filters, backend=backend)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and filters.grad.dtype == torch.float32


@pytest.mark.parametrize("backend", BACKENDS["head"])
@pytest.mark.parametrize("window", [1, 2, 5, 21])
def test_state_continues_the_sequence(backend, window):
    x, filters, bias = inputs((2, 60, 2, 3, window))
    whole, last = head_conv(x, filters, bias, return_state=True, backend=backend)
    state, outputs = None, []
    for chunk in x.split([1, 2, 30, 1, 26], dim=1):
        y, state = head_conv(
            chunk, filters, bias, initial_state=state, return_state=True, backend=backend
        )
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole)
    assert torch.equal(state, last) and state.shape == (2, window - 1, 2, 3)


@pytest.mark.parametrize("backend", BACKENDS["head"])
def test_gradient_of_the_state(backend):
    x, filters, _ = inputs((1, 9, 2, 3, 5))
    state = torch.randn(1, 4, 2, 3, dtype=torch.float64, requires_grad=True)
    y = head_conv(x, filters, initial_state=state, backend=backend)
    expected = naive(torch.cat([state, x], dim=1), filters)[:, 4:]
    dy = torch.randn_like(y)
    torch.testing.assert_close(gradients(y, state, dy), gradients(expected, state, dy))


@pytest.mark.parametrize("backend", BACKENDS["head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_documents_are_isolated_bit_for_bit(backend, dtype):
    x, filters, _ = inputs((1, 90, 2, 4, 21), dtype)
    ids = (torch.arange(90) >= 41).long()[None]
    changed = x.clone()
    changed[:, :41] = torch.randn(1, 41, 2, 4).to(dtype)
    y, y_changed = (
        head_conv(tensor, filters, document_ids=ids, backend=backend) for tensor in (x, changed)
    )
    assert torch.equal(y[:, 41:], y_changed[:, 41:])
    assert not torch.equal(y[:, :41], y_changed[:, :41])


def test_filter_gradient_is_deterministic():
    x, filters, _ = inputs((4, 200, 4, 8, 21), torch.float32)
    filters.requires_grad_()
    runs = [gradients(head_conv(x, filters), filters, torch.ones_like(x))[0] for _ in range(3)]
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])


def test_toeplitz_matrix_and_its_transpose():
    filters = torch.tensor([[1.0, 2.0, 3.0]])
    expected = torch.tensor([[3.0, 2, 1, 0, 0], [0, 3, 2, 1, 0], [0, 0, 3, 2, 1]])
    assert torch.equal(banded_toeplitz(filters, 3)[0], expected)
    matrix = torch.randn(2, 6, 8, dtype=torch.float64)
    filters = torch.randn(2, 3, dtype=torch.float64)
    dot = (banded_toeplitz(filters, 6) * matrix).sum()
    torch.testing.assert_close(dot, (filters * sum_of_diagonals(matrix, 3)).sum())


def test_operator_registration():
    """Fake tensors, autograd and schema, as torch.compile needs them."""
    x, filters, _ = inputs((2, 40, 2, 4, 5), torch.float32)
    arguments = (x.requires_grad_(), filters.requires_grad_(), documents(2, 40))
    torch.library.opcheck(torch.ops.cat_lm.head_conv_toeplitz.default, arguments)


def test_choice_of_backend_is_explained():
    assert choose_backend(torch.float32, 21)[0] == "toeplitz"
    assert choose_backend(torch.float32, 1)[0] == "reference"
    assert choose_backend(torch.float32, 21, "reference") == ("reference", "asked for by name")
    with pytest.raises(ValueError, match="auto or one of reference, toeplitz"):
        choose_backend(torch.float32, 21, "tritno")
    with pytest.raises(ValueError, match="floating-point"):
        choose_backend(torch.int64, 21)


def test_wrong_shapes_are_named():
    x, filters, bias = inputs((2, 10, 3, 4, 5))
    with pytest.raises(ValueError, match=r"filters must be \[3, W\]"):
        head_conv(x, filters[:2])
    with pytest.raises(ValueError, match=r"bias must be \[3, 4\]"):
        head_conv(x, filters, bias[:, :2])
    with pytest.raises(ValueError, match=r"initial_state must be \[2, 4, 3, 4\]"):
        head_conv(x, filters, initial_state=x[:, :3])
    with pytest.raises(ValueError, match="together with a state"):
        head_conv(x, filters, document_ids=documents(2, 10), return_state=True)
    with pytest.raises(ValueError, match="no time steps"):
        head_conv(x[:, :0], filters)


def test_document_runs_and_positions():
    ids = torch.tensor([[7, 7, 3, 7, 7, 7], [0, 0, 0, 0, 0, 1]])
    runs = document_runs(ids)
    assert runs.tolist() == [[0, 0, 1, 2, 2, 2], [0, 0, 0, 0, 0, 1]]
    assert document_positions(runs).tolist() == [[0, 1, 0, 0, 1, 2], [0, 1, 2, 3, 4, 0]]
