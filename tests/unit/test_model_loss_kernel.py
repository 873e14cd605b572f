"""Where the head's loss takes Triton's kernel, its chunks, and what it moves in a GPU's memory."""

from __future__ import annotations

import importlib.util
from collections import Counter

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cat_lm.ops.loss import linear_cross_entropy as loss_module

aten = torch.ops.aten
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


class Traffic(TorchDispatchMode):
    """Counts kernels and the bytes that they read and write, by operator; views are none."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.kernels = Counter(), Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # Fake tensors have no such product: they would copy a result that needs a device.
        is_product = operator is aten.addmm.dtype_out
        result = kwargs["out"] if is_product else operator(*args, **kwargs)
        name = operator._schema.name
        if name.startswith("aten::") and not operator.is_view and "empty" not in name:
            self.note(name.removeprefix("aten::"), args, result)
        return result

    def note(self, name: str, *tensors) -> None:
        """One kernel, which reads or writes each of the tensors."""
        found = [x for x in tree_leaves(tensors) if isinstance(x, Tensor)]
        self.kernels[name] += 1
        self.bytes[name] += sum(x.numel() * x.element_size() for x in found)


def traffic(by_kernel, device: str, shape: tuple[int, int, int], monkeypatch) -> Traffic:
    """Of one batch [N, C] and V words in bf16, with both gradients, on a device or its fake."""
    tokens, vocabulary, width = shape
    counted = Traffic()
    monkeypatch.setattr(
        "cat_lm.ops.loss.cross_entropy_triton.cross_entropy_",
        lambda logits, labels, losses, wanted: counted.note("kernel", logits, logits),
    )
    with FakeTensorMode():
        half = {"dtype": torch.bfloat16, "device": device}
        hidden, weight = torch.empty(tokens, width, **half), torch.empty(vocabulary, width, **half)
        labels = torch.empty(tokens, dtype=torch.long, device=device)
        sums = loss_module._room(hidden, weight, labels, torch.bfloat16, True, True)
        with counted:
            loss_module._add_chunks(by_kernel, hidden, weight, labels, sums, (True, True))
    return counted


@needs_triton
def test_bytes_at_370m(monkeypatch):
    """16,384 tokens, 32,000 words, width 1,024: five times each logit in bf16, and little else.

    The product writes a logit, the kernel reads and writes it, two products read its gradient.
    Each chunk reads the weight twice and its gradient in fp32, which it writes.
    """
    tokens, vocabulary, width = shape = (16384, 32000, 1024)
    found = traffic(True, "cuda", shape, monkeypatch)
    logits, weight, hidden = 2 * tokens * vocabulary, 2 * vocabulary * width, 2 * tokens * width
    chunks = 2  # of 500 MiB
    assert found.kernels == {"mm": 2 * chunks, "kernel": chunks, "addmm": chunks, "sum": 1}
    expected = 5 * logits + chunks * (2 * weight + 2 * 2 * weight) + 3 * hidden + 4 * tokens + 4
    assert sum(found.bytes.values()) == expected < 6.2e9
    # What torch's operators move, one at a time and in fp32: of fewer tokens, in proportion.
    tokens = 2096  # four chunks
    found = traffic(False, "cpu", (tokens, *shape[1:]), monkeypatch)
    assert sum(found.bytes.values()) / tokens > 7 * expected / 16384


@needs_triton
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


def test_who_serves(monkeypatch):
    with FakeTensorMode():
        on_gpu, on_cpu = torch.empty(1, device="cuda"), torch.empty(1)
    serves = loss_module._kernel_serves
    installed = importlib.util.find_spec("triton") is not None
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert serves(on_gpu, dtype) is installed and not serves(on_cpu, dtype)
    assert not serves(on_gpu, torch.float64), "the kernel sums in fp32"
    monkeypatch.setattr(loss_module, "INSTALLED", False)
    assert not serves(on_gpu, torch.bfloat16)
