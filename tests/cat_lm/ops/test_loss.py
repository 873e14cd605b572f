"""Where the head's loss takes Triton's kernel, its chunks, and what it moves in a GPU's memory."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cat_lm.ops.loss import linear_cross_entropy as loss_module
from tests.cat_lm.ops.compiled import leaf, needs_triton
from tests.cat_lm.ops.fake_gpu import Counts, fake_gpu


def moved(tokens: int, vocabulary: int, width: int) -> Counts:
    """Count the pass that computes the loss and both gradients in bf16."""
    with fake_gpu() as gpu:
        hidden, weight = leaf(tokens, width), leaf(vocabulary, width)
        labels = torch.empty(tokens, dtype=torch.long)
        gpu.counts = Counts()
        loss_module.linear_cross_entropy(hidden, weight, labels)
        return gpu.counts


@needs_triton
def test_loss_reads_and_writes_each_logit_five_times(monkeypatch):
    tokens, vocabulary, width = shape = (16384, 32000, 1024)  # 370M's
    monkeypatch.setattr(loss_module, "_kernel_serves", lambda *_: True)
    found = moved(*shape)
    # Two chunks of 500 MiB: a product writes a logit, the kernel reads and writes it, and two
    # products read its gradient. A chunk reads the weight twice, and the weight's gradient in fp32.
    assert found.kernels["cross_entropy_kernel"] == 2
    logits, weight = 2 * tokens * vocabulary, 2 * vocabulary * width
    assert found.bytes < 5 * logits + 2 * 12 * weight
    # What torch's operators move, one at a time and in fp32: of fewer tokens, in proportion.
    monkeypatch.setattr(loss_module, "_kernel_serves", lambda *_: False)
    assert moved(2096, *shape[1:]).bytes / 2096 > 5 * found.bytes / tokens


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "itemsize", "length", "stride"),
    [
        (16384, 32000, 2, 8192, 32000),  # two chunks of 500 MiB
        (16384, 50257, 2, 4096, 50304),  # rows of whole vectors
        (131072, 50304, 4, 16384, 50304),  # eight chunks, whatever they take
        (100, 257, 2, 128, 320),  # all at once, in whole tiles of a product
        (0, 257, 4, 128, 320),
    ],
)
def test_chunks_are_few(tokens, vocabulary, itemsize, length, stride):
    assert loss_module.kernel_chunk(tokens, vocabulary, itemsize) == (length, stride)
    assert -(-tokens // length) <= 8


@needs_triton
def test_kernel_serves_a_gpu_in_fp32_and_half_precision():
    with FakeTensorMode():
        on_gpu, on_cpu = torch.empty(1, device="cuda"), torch.empty(1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert loss_module._kernel_serves(on_gpu, dtype)
        assert not loss_module._kernel_serves(on_cpu, dtype)
    assert not loss_module._kernel_serves(on_gpu, torch.float64)
