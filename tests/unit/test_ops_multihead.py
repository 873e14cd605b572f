"""The multi-head convolution against its definition in fp64 loops."""

from __future__ import annotations

import pytest
import torch

from cat_lm.ops import BACKENDS, choose_backend, head_conv, multihead_conv
from cat_lm.ops.multihead import multihead_conv1d, multihead_conv_reference

torch.manual_seed(0)


def naive(x, filters, document_ids=None, state=None):
    """y[b,t,i,:] = sum_h sum_j F[j,i,h] x[b,t−j,h,:], one number at a time over b, t, i, h, j."""
    batch, time, heads, _ = x.shape
    past = 0 if state is None else state.shape[1]
    x = x if state is None else torch.cat([state, x], dim=1)
    y = torch.zeros(batch, time, *x.shape[2:], dtype=x.dtype)
    for b in range(batch):
        for t in range(time):
            for j in range(filters.shape[0]):
                source = past + t - j
                if source < 0:
                    continue
                if document_ids is not None and len(set(document_ids[b][t - j : t + 1])) > 1:
                    continue
                for i in range(heads):
                    for h in range(heads):
                        y[b, t, i] += filters[j, i, h] * x[b, source, h]
    return y


def draw(time, window, batch=2, heads=3, width=4):
    x = torch.randn(batch, time, heads, width, dtype=torch.double, requires_grad=True)
    filters = torch.randn(window, heads, heads, dtype=torch.double, requires_grad=True)
    return x, filters


@pytest.mark.parametrize("backend", BACKENDS["multihead"])
@pytest.mark.parametrize(("time", "window"), [(1, 1), (1, 4), (3, 5), (9, 3), (11, 1)])
def test_values(backend, time, window):
    x, filters = draw(time, window)
    bias = torch.randn(3, 4, dtype=torch.double)
    found = multihead_conv(x, filters, bias, backend=backend)
    torch.testing.assert_close(found, naive(x, filters) + bias)


@pytest.mark.parametrize("convolve", [multihead_conv1d, multihead_conv_reference])
@pytest.mark.parametrize("runs", [None, [[0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 0]]])
def test_gradients(convolve, runs):
    x, filters = draw(7, 4)
    runs = None if runs is None else torch.tensor(runs)
    assert torch.autograd.gradcheck(lambda a, b: convolve(a, b, runs), (x, filters))
    # The gradient of a sum is expanded, that of a transposed product is not contiguous.
    weights = torch.randn(2, 3, 7, 4, dtype=torch.double)
    for loss in (torch.sum, lambda y: (y.transpose(1, 2) * weights).sum()):
        found = torch.autograd.grad(loss(convolve(x, filters, runs)), (x, filters))
        rows = None if runs is None else runs.tolist()
        expected = torch.autograd.grad(loss(naive(x, filters, rows)), (x, filters))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backend", BACKENDS["multihead"])
def test_documents_do_not_leak(backend):
    ids = torch.tensor([[5, 5, 5, 2, 2, 9, 9, 9], [1, 1, 1, 1, 1, 1, 1, 1]])
    x, filters = draw(8, 4)
    found = multihead_conv(x, filters, document_ids=ids, backend=backend)
    torch.testing.assert_close(found, naive(x, filters, ids.tolist()))
    changed = x.detach().clone()
    changed[0, 2] += 1e3  # the last token of the first document
    again = multihead_conv(changed, filters, document_ids=ids, backend=backend)
    assert torch.equal(found[0, 3:], again[0, 3:])


@pytest.mark.parametrize("backend", BACKENDS["multihead"])
@pytest.mark.parametrize("cuts", [[1] * 9, [2, 7], [4, 1, 4]])
def test_chunks_with_state_equal_the_whole(backend, cuts):
    x, filters = draw(9, 4)
    whole = multihead_conv(x, filters, backend=backend)
    state, parts = None, []
    for chunk in x.split(cuts, dim=1):
        part, state = multihead_conv(
            chunk, filters, initial_state=state, return_state=True, backend=backend
        )
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)


def test_diagonal_filters_are_the_convolution_per_head():
    x, _ = draw(40, 5)
    filters = torch.randn(3, 5, dtype=torch.double)
    torch.testing.assert_close(
        multihead_conv(x, torch.diag_embed(filters.T)), head_conv(x, filters)
    )


def test_wrong_input():
    x, filters = draw(5, 2)
    with pytest.raises(ValueError, match=r"filters must be \[W, 3, 3\]"):
        multihead_conv(x, filters[:, :2])
    with pytest.raises(ValueError, match="choose auto or one of"):
        multihead_conv(x, filters, backend="toeplitz")
    with pytest.raises(ValueError, match="together with a state"):
        multihead_conv(x, filters, document_ids=torch.zeros(2, 5), return_state=True)
    assert choose_backend(torch.float32, 3, conv_type="multihead")[0] == "conv1d"
