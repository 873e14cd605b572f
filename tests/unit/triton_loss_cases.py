"""Tests of the cross-entropy kernel through Triton's interpreter, run by test_ops_triton.py.

Compared with torch's dense cross-entropy in fp64 of the same logits.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from cat_lm.ops.loss import cross_entropy_triton
from cat_lm.ops.loss import linear_cross_entropy as loss_module
from cat_lm.ops.loss.cross_entropy_triton import cross_entropy_
from cat_lm.ops.loss.linear_cross_entropy import linear_cross_entropy

# Of gradients between −1 and 1; the interpreter rounds to bf16 toward zero.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Rows of several blocks without vocabularies of tens of thousands."""
    monkeypatch.setattr(cross_entropy_triton, "_LONGEST_BLOCK", 128)


def rows_of(vocabulary: int, dtype: torch.dtype, stride: int, scale: float = 3.0):
    """Logits in rows of `stride` numbers, what lies between them NaN, and labels."""
    generator = torch.Generator().manual_seed(vocabulary)
    room = torch.full((7, stride), torch.nan, dtype=dtype)
    room[:, :vocabulary] = scale * torch.randn(7, vocabulary, generator=generator)
    labels = torch.randint(0, vocabulary, (7,), generator=generator)
    labels[0], labels[1], labels[4] = vocabulary - 1, 0, -100
    return room[:, :vocabulary], labels


def definition(logits: torch.Tensor, labels: torch.Tensor):
    exact = logits.double().requires_grad_()
    losses = F.cross_entropy(exact, labels, reduction="none")
    return losses.detach(), torch.autograd.grad(losses.sum(), exact)[0]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("vocabulary", "stride"), [(97, 128), (256, 256), (257, 320), (1000, 1000), (1, 64)]
)
def test_losses_and_gradients_in_place(dtype, vocabulary, stride):
    logits, labels = rows_of(vocabulary, dtype, stride)
    wanted, gradient = definition(logits, labels)
    losses = torch.full((7,), torch.nan)
    cross_entropy_(logits, labels, losses, True)
    torch.testing.assert_close(losses.double(), wanted, rtol=1e-6, atol=2e-6)
    assert not logits[4].any() and losses[4] == 0.0
    error = (logits.double() - gradient).abs().max()
    assert error <= TOLERANCE[dtype]


@pytest.mark.parametrize("shift", [-3e4, 3e4])
def test_large_logits_stay_finite(shift):
    """Of the largest so far alone: exponentials of the logits themselves are 0 or infinite."""
    logits, labels = rows_of(300, torch.float32, 320)
    logits += shift
    logits[2, 299] += 500.0  # the last block has by far the largest
    wanted, gradient = definition(logits, labels)
    losses = torch.empty(7)
    cross_entropy_(logits, labels, losses, True)
    torch.testing.assert_close(losses.double(), wanted, rtol=1e-6, atol=5e-3)
    torch.testing.assert_close(logits.double(), gradient, rtol=5e-3, atol=1e-6)


def test_without_a_gradient_the_logits_stay():
    logits, labels = rows_of(200, torch.bfloat16, 256)
    before, losses = logits.clone(), torch.empty(7)
    cross_entropy_(logits, labels, losses, False)
    assert torch.equal(logits, before)
    torch.testing.assert_close(losses.double(), definition(before, labels)[0])


@pytest.mark.parametrize("label", [200, -1, -101, 255])
def test_a_label_outside_of_the_vocabulary_is_no_number(label):
    logits, labels = rows_of(200, torch.float32, 256)
    labels[2], losses = label, torch.empty(7)
    cross_entropy_(logits, labels, losses, True)
    assert losses.isnan().tolist() == [False, False, True, False, False, False, False]
    assert logits[2].isnan().all() and logits[[0, 1, 3, 4, 5, 6]].isfinite().all()


# The head's loss by way of the kernel


@pytest.fixture
def several_chunks(monkeypatch):
    """Chunks of 16 of the 40 positions; the last one is not full."""
    monkeypatch.setattr(loss_module, "_kernel_serves", lambda *_: True)
    monkeypatch.setattr(loss_module, "KERNEL_CHUNK_BYTES", 2000)
    monkeypatch.setattr(loss_module, "MOST_KERNEL_CHUNKS", 3)
    monkeypatch.setattr(loss_module, "_ROWS_OF_A_TILE", 16)


def head_case(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 20, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(97, 16, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, 97, (2, 20), generator=generator)
    labels[torch.rand(2, 20, generator=generator) < 0.3] = -100
    return hidden, weight, labels


@pytest.mark.parametrize(
    ("dtype", "autocast", "tolerance"),
    [
        (torch.float32, False, 1e-6),
        (torch.bfloat16, False, 2e-2),
        (torch.float32, True, 2e-2),
    ],
)
def test_loss_of_the_head(several_chunks, dtype, autocast, tolerance):
    hidden, weight, labels = head_case(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = linear_cross_entropy(hidden, weight, labels)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logits = (exact[0] @ exact[1].T).flatten(0, 1)
    wanted = F.cross_entropy(logits, labels.flatten(), reduction="sum")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), wanted, rtol=tolerance, atol=0)
    found = torch.autograd.grad(0.7 * loss, (hidden, weight))
    for gradient, right in zip(found, torch.autograd.grad(0.7 * wanted, exact), strict=True):
        assert gradient.dtype == dtype
        assert (gradient - right).abs().max() <= tolerance * right.abs().max()


def test_only_what_is_wanted(several_chunks):
    hidden, weight, labels = head_case(torch.float32)
    full = linear_cross_entropy(hidden, weight, labels)
    wanted = torch.autograd.grad(full, (hidden, weight))
    for index, other in ((0, weight), (1, hidden)):
        other.requires_grad_(False)
        (found,) = torch.autograd.grad(
            linear_cross_entropy(hidden, weight, labels), (hidden, weight)[index]
        )
        assert torch.equal(found, wanted[index])
        other.requires_grad_(True)
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(hidden, weight, labels), full)


def test_nothing_scored_and_nothing_given(several_chunks):
    hidden, weight, labels = head_case(torch.float32)
    for chosen in (hidden, hidden[:0]):
        ignored = torch.full_like(labels[: len(chosen)], -100)
        loss = linear_cross_entropy(chosen, weight, ignored)
        gradients = torch.autograd.grad(loss, (hidden, weight))
        assert loss == 0 and not any(gradient.any() for gradient in gradients)


def test_labels_may_have_any_stride(several_chunks):
    hidden, weight, labels = head_case(torch.float32)
    strided = torch.stack([labels, labels + 1], dim=-1)[..., 0]
    assert torch.equal(
        linear_cross_entropy(hidden[0], weight, strided[0]),
        linear_cross_entropy(hidden[0], weight, labels[0]),
    )
