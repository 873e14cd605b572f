"""Where the head's loss takes a kernel, its chunks, and what it moves in a GPU's memory."""

from __future__ import annotations

import pytest
import torch

from cat_lm.ops.loss import cross_entropy_cpu
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
    found = moved(*shape)
    # Two chunks of 500 MiB: a product writes a logit, the kernel reads and writes it, and two
    # products read its gradient. A chunk reads the weight twice, and the weight's gradient in fp32.
    assert found.kernels["cross_entropy_kernel"] == 2
    logits, weight = 2 * tokens * vocabulary, 2 * vocabulary * width
    assert found.bytes < 5 * logits + 2 * 12 * weight
    # What torch's operators move, one at a time and in fp32: of fewer tokens, in proportion.
    monkeypatch.setattr(loss_module, "_kernel", lambda *_: None)
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
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kernels_serve_fp32_and_half_precision(device):
    kernels = {
        loss_module._kernel(torch.device(device), dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    }
    module = cross_entropy_cpu if device == "cpu" else loss_module.cross_entropy_triton
    assert kernels == {module.cross_entropy_}
    assert loss_module._kernel(torch.device(device), torch.float64) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cpu_kernel_gives_the_same_bits_on_two_threads(dtype):
    torch.manual_seed(0)
    logits, labels = 8 * torch.randn(301, 97), torch.randint(97, (301,))
    labels[::3] = -100
    found, threads = [], torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        gradient, losses = logits.to(dtype, copy=True), torch.empty(301)
        cross_entropy_cpu.cross_entropy_(gradient, labels, losses, True)
        found.append((gradient, losses))
    torch.set_num_threads(threads)
    assert all(map(torch.equal, *found))


def test_label_outside_of_the_vocabulary_is_named():
    hidden, weight = torch.ones(2, 4), torch.ones(97, 4)
    with pytest.raises(IndexError, match="label 97 is not one of the 97 ids"):
        loss_module.linear_cross_entropy(hidden, weight, torch.tensor([5, 97]))
