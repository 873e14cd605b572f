"""The head's loss on a CUDA GPU, by way of the kernel: real sizes, equal runs, memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.ops.loss import linear_cross_entropy as loss_module
from cat_lm.ops.loss.linear_cross_entropy import linear_cross_entropy
from cat_lm.ops.runtime.triton_launch import INSTALLED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(not INSTALLED, reason="triton is not installed"),
]


def case(tokens: int, vocabulary: int, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(vocabulary)
    hidden = torch.randn(tokens, width, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, device="cuda") / width**0.5).to(dtype)
    labels = torch.randint(0, vocabulary, (tokens,), device="cuda")
    labels[torch.rand(tokens, device="cuda") < 0.1] = -100
    return hidden, weight.requires_grad_(), labels


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 6e-3)])
@pytest.mark.parametrize("vocabulary", [257, 32000, 50257])
def test_equals_the_dense_loss_and_itself(vocabulary, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(loss_module, "KERNEL_CHUNK_BYTES", 2**25)  # several chunks
    hidden, weight, labels = case(3001, vocabulary, 256, dtype)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    wanted = F.cross_entropy(exact[0] @ exact[1].T, labels, reduction="sum")
    wanted = (wanted, *torch.autograd.grad(wanted, exact))
    runs = []
    for _ in range(2):
        loss = linear_cross_entropy(hidden, weight, labels)
        runs.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    for first, second, right in zip(*runs, wanted, strict=True):
        assert torch.equal(first, second)
        assert (first.double() - right).norm() / right.norm() < tolerance


def test_holds_a_chunk_of_logits_and_the_gradients():
    hidden, weight, labels = case(16384, 32000, 64, torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, labels).backward()
    length, stride = loss_module.kernel_chunk(16384, 32000, 2)
    gradients = 4 * weight.numel() + 2 * (weight.numel() + 2 * hidden.numel())
    expected = 2 * length * stride + 2 * gradients
    assert torch.cuda.max_memory_allocated() - before < expected + 2**26


def test_more_than_two_to_the_31_logits(monkeypatch):
    monkeypatch.setattr(loss_module, "KERNEL_CHUNK_BYTES", 2**34)
    hidden, weight, labels = case(20000, 128256, 16, torch.bfloat16)
    (found,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), hidden)
    last = hidden.detach()[-64:].requires_grad_()
    (right,) = torch.autograd.grad(linear_cross_entropy(last, weight, labels[-64:]), last)
    assert (found[-64:] - right).norm() < 0.02 * right.norm()  # products of other shapes
