"""The convolutions under torch.vmap equal a loop, whichever arguments are stacked."""

import itertools

import pytest
import torch

from cat_lm.ops import depthwise_conv, head_conv, multihead_conv
from tests.unit.naive_convolution import filter_shape

CONVOLUTIONS = {"head": head_conv, "depthwise": depthwise_conv, "multihead": multihead_conv}
SIZE = 3


def _leaves(conv_type, stacked, heads=2, width=4, window=3):
    """x, filters and bias; those named in `stacked` with SIZE of them, along an axis of each's."""
    shapes = {
        "x": (2, 9, heads, width),
        "filters": filter_shape(conv_type, heads, width, window),
        "bias": (heads, width),
    }
    axes = {"x": 1, "filters": 0, "bias": 2}  # any axis may be the stacked one
    leaves, chosen = [], []
    for name, shape in shapes.items():
        axis = axes[name] if name in stacked else None
        shape = shape if axis is None else (*shape[:axis], SIZE, *shape[axis:])
        leaves.append(torch.randn(shape, dtype=torch.float64, requires_grad=True))
        chosen.append(axis)
    return leaves, chosen


def _loop(function, leaves, axes):
    pairs = list(zip(leaves, axes, strict=True))
    return torch.stack(
        [function(*(t if a is None else t.select(a, i) for t, a in pairs)) for i in range(SIZE)]
    )


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    "stacked",
    [c for n in (1, 2, 3) for c in itertools.combinations(("x", "filters", "bias"), n)],
    ids="+".join,
)
@pytest.mark.parametrize("conv_type", CONVOLUTIONS)
def test_equals_a_loop_forward_and_backward(conv_type, stacked, backend):
    torch.manual_seed(0)
    leaves, axes = _leaves(conv_type, stacked)

    def convolve(x, filters, bias):
        return CONVOLUTIONS[conv_type](x, filters, bias, backend=backend).sin()

    y, expected = torch.vmap(convolve, tuple(axes))(*leaves), _loop(convolve, leaves, axes)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    found, right = (torch.autograd.grad(output, leaves, dy) for output in (y, expected))
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("conv_type", CONVOLUTIONS)
def test_without_bias_and_within_documents(conv_type):
    torch.manual_seed(0)
    (x, filters, _), axes = _leaves(conv_type, ("x", "filters"))
    shared = torch.tensor([[0, 0, 0, 1, 1, 0, 0, 2, 2], [7, 7, 7, 7, 7, 7, 7, 7, 3]])
    others = torch.stack([shared, shared.flip(0), shared.flip(1)])

    def convolve(x, filters, documents):
        return CONVOLUTIONS[conv_type](x, filters, document_ids=documents)

    for documents, axis in ((shared, None), (others, 0)):
        arguments, where = (x, filters, documents), (*axes[:2], axis)
        y, expected = torch.vmap(convolve, where)(*arguments), _loop(convolve, arguments, where)
        torch.testing.assert_close(y, expected)
        for wanted in ((x, filters), (filters,)):
            dy = torch.randn_like(y)
            found, right = (
                torch.autograd.grad(output, wanted, dy, retain_graph=True)
                for output in (y, expected)
            )
            torch.testing.assert_close(found, right)
    shared_filters = filters.select(axes[1], 0).detach()
    where = (axes[0], None, 0)
    y = torch.vmap(convolve, where)(x, shared_filters, others)
    torch.testing.assert_close(y, _loop(convolve, (x, shared_filters, others), where))


@pytest.mark.parametrize("conv_type", CONVOLUTIONS)
def test_many_gradients_of_one_convolution_at_once(conv_type):
    """autograd.grad with is_grads_batched runs the backward operator under vmap."""
    torch.manual_seed(0)
    leaves, _ = _leaves(conv_type, ())
    y = CONVOLUTIONS[conv_type](*leaves)
    many = torch.randn(SIZE, *y.shape, dtype=y.dtype)
    for wanted in (leaves, leaves[1:2]):
        found = torch.autograd.grad(y, wanted, many, is_grads_batched=True, retain_graph=True)
        right = [torch.autograd.grad(y, wanted, dy, retain_graph=True) for dy in many]
        right = [torch.stack(parts) for parts in zip(*right, strict=True)]
        torch.testing.assert_close(list(found), right)


@pytest.mark.parametrize("conv_type", ["head", "depthwise"])
def test_a_strange_value_stays_in_its_convolution(conv_type):
    """Also where heads are folded together: a diverged model does not touch its neighbours."""
    torch.manual_seed(0)
    leaves, axes = _leaves(conv_type, ("x", "filters", "bias"))
    with torch.no_grad():
        leaves[0].select(axes[0], 1).fill_(torch.nan)
    y = torch.vmap(CONVOLUTIONS[conv_type], tuple(axes))(*leaves)
    assert y[1].isnan().all() and y[[0, 2]].isfinite().all()
    gradients = torch.autograd.grad(y.sum(), leaves[1])[0].movedim(axes[1], 0)
    assert gradients[1].isnan().all() and gradients[[0, 2]].isfinite().all()
