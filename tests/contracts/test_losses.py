"""Contracts of the output projection's loss, by torch and by each kernel in its chunks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cat_lm.ops.loss import cross_entropy_cpu
from cat_lm.ops.loss import linear_cross_entropy as loss_module
from tests.contracts.operators import INTERPRETED, assert_close, exact, linear_cross_entropy
from tests.reference.loss import cross_entropy


@pytest.fixture(autouse=True, params=["torch", "C++", *["triton"] * INTERPRETED])
def backend(request, monkeypatch):
    """Take chunks of 16 of the 40 positions, of which the last one is not full."""
    kernel = None if request.param == "torch" else cross_entropy_cpu.cross_entropy_
    if request.param == "triton":
        kernel = loss_module.cross_entropy_triton.cross_entropy_
    monkeypatch.setattr(loss_module, "_kernel", lambda *_: kernel)
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", 16 * 97)
    monkeypatch.setattr(loss_module, "KERNEL_CHUNK_BYTES", 2000)
    monkeypatch.setattr(loss_module, "_ROWS_OF_A_TILE", 16)


def draw(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(s).to(dtype).requires_grad_() for s in ((2, 20, 16), (97, 16)))
    labels = torch.randint(97, (2, 20))
    labels[torch.rand(2, 20) < 0.3] = -100
    return hidden, weight, labels


@pytest.mark.parametrize(
    ("dtype", "autocast", "bound"),
    [(torch.float32, False, 1e-6), (torch.bfloat16, False, 2e-2), (torch.float32, True, 2e-2)],
)
def test_loss_equals_reference_with_gradients(dtype, autocast, bound):
    hidden, weight, labels = draw(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = linear_cross_entropy(hidden, weight, labels)
    h, w = exact([hidden, weight])
    losses, slopes = cross_entropy((h @ w.T).detach().flatten(0, 1), labels.flatten())
    assert loss.dtype == torch.float32
    found = torch.autograd.grad(0.7 * loss, (hidden, weight))
    assert all(one.dtype == dtype for one in found)
    wanted = 0.7 * (slopes @ w).view_as(h), 0.7 * slopes.T @ h.flatten(0, 1)
    assert_close([loss, *found], [losses.sum(), *wanted], bound)


def test_loss_gives_only_gradients_that_are_asked_for():
    hidden, weight, labels = draw()
    full = linear_cross_entropy(hidden, weight, labels)
    wanted = torch.autograd.grad(full, (hidden, weight))
    found = torch.autograd.grad(linear_cross_entropy(hidden, weight.detach(), labels), hidden)
    assert torch.equal(found[0], wanted[0])
    found = torch.autograd.grad(linear_cross_entropy(hidden.detach(), weight, labels), weight)
    assert torch.equal(found[0], wanted[1])
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(hidden, weight, labels), full)


def test_loss_of_nothing_scored_or_given_is_zero_with_gradients():
    hidden, weight, labels = draw()
    for chosen in (hidden, hidden[:0]):
        ignored = torch.full_like(labels[: len(chosen)], -100)
        loss = linear_cross_entropy(chosen, weight, ignored)
        gradients = torch.autograd.grad(loss, (hidden, weight))
        assert loss == 0 and not any(gradient.any() for gradient in gradients)


def test_loss_takes_labels_of_any_stride():
    hidden, weight, labels = draw()
    strided = torch.stack([labels, labels + 1], dim=-1)[..., 0]
    found = [linear_cross_entropy(hidden[0], weight, given[0]) for given in (strided, labels)]
    assert torch.equal(*found)


def test_loss_refuses_second_and_forward_derivatives():
    hidden, weight, labels = draw()
    loss = linear_cross_entropy(hidden, weight, labels)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda h: linear_cross_entropy(h, weight, labels), (hidden,), (hidden,))
