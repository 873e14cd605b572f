"""Contracts of kernels that only Triton has: a token of decoding, the loss, norms.

`test_other_processes.py` runs this file in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from cat_lm import ops
from cat_lm.ops.activation import gelu_triton
from cat_lm.ops.activation.gelu import gelu_with_bias
from cat_lm.ops.convolution import kinds
from cat_lm.ops.residual import parallel, parallel_triton
from cat_lm.training.preflight.facts import why_no_kernel
from tests.contracts.operators import (
    BOUNDS,
    assert_close,
    can_step,
    convolve_step,
    cross_entropy_,
    exact,
    with_gradients,
)
from tests.contracts.test_packed_convolution import angles, turned
from tests.reference import convolution as reference
from tests.reference.loss import cross_entropy

STEPS = [  # kind, window, earlier tokens, heads of queries and keys, width, rotated, streams, SiLU
    ("head", 21, 20, (2, 2), 16, 4, "qkv", False),
    ("head", 5, 2, (2, 2), 16, 16, "kv", False),  # a prompt shorter than the window
    ("head", 2, 0, (2, 1), 16, 2, "q", False),
    ("depthwise", 40, 39, (2, 1), 16, 0, "qkv", False),
    ("depthwise", 4, 3, (1, 1), 20, 6, "qkv", True),
    ("multihead", 3, 2, (3, 3), 16, 4, "qk", False),
    ("multihead", 5, 2, (4, 2), 8, 8, "qkv", True),
]


@pytest.mark.parametrize(
    ("kind", "window", "rows", "heads", "width", "rotated", "streams", "silu"), STEPS
)
def test_decoding_step_by_triton_equals_reference(
    kind, window, rows, heads, width, rotated, streams, silu
):
    torch.manual_seed(0)
    number = dict(zip("qkv", (heads[0], heads[1], heads[1]), strict=True))
    x = {s: torch.randn(2, rows + 1, number[s], width) for s in "qkv"}
    bias = {s: torch.randn(number[s], width) for s in "qkv"}
    taps = {s: torch.randn(kinds.get(kind).filter_shape(number[s], width, window)) for s in streams}
    rotary, kept = angles(1, rotated), min(rows + 1, window - 1)
    room = {s: torch.full_like(x[s][:, :kept], torch.nan) for s in streams}
    found = convolve_step(
        kind,
        [x[s][:, -1:].contiguous() for s in "qkv"],
        [x[s][:, :-1].contiguous() if s in streams else None for s in "qkv"],
        [taps.get(s) for s in "qkv"],
        list(bias.values()),
        [room.get(s) for s in "qkv"],
        window=window,
        rotary=rotary,
        silu=silu,
    )
    for s, y in zip("qkv", found, strict=True):
        wanted = x[s][:, -1:] + bias[s]
        if s in streams:
            wanted = reference.convolve(kind, x[s], taps[s], bias[s])[:, -1:]
            wanted = F.silu(wanted) if silu else wanted
            assert torch.equal(room[s], x[s][:, rows + 1 - kept :])
        wanted = wanted if s == "v" else turned(wanted.double(), rotary)
        assert_close([y], [wanted], 1e-5)


def test_decoding_step_serves_triton_without_gradients():
    x = torch.zeros(1, 1, 2, 16)
    assert can_step("head", x, 4, "triton") and not can_step("head", x, 1, "triton")
    assert not can_step("head", x.clone().requires_grad_(), 4, "triton")
    assert not can_step("head", x, 4, "cpu") and not can_step("head", x, 4)


BOUNDS_OF_ROWS = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("vocabulary", "stride"), [(17000, 17024), (8192, 8192), (257, 320), (1, 64)]
)
def test_cross_entropy_equals_reference_with_gradients(dtype, vocabulary, stride):
    """Rows take one block or several, with NaN between them; gradients replace the logits."""
    torch.manual_seed(vocabulary)
    whole = torch.full((7, stride), torch.nan, dtype=dtype)
    whole[:, :vocabulary] = 3 * torch.randn(7, vocabulary)
    logits, labels = whole[:, :vocabulary], torch.randint(vocabulary, (7,))
    labels[0], labels[1], labels[4] = vocabulary - 1, 0, -100
    before, losses = logits.clone(), torch.full((7,), torch.nan)
    cross_entropy_(logits, labels, losses, False)
    assert torch.equal(logits, before)
    again = torch.full((7,), torch.nan)
    cross_entropy_(logits, labels, again, True)
    assert torch.equal(losses, again) and losses[4] == 0 and not logits[4].any()
    wanted, gradient = cross_entropy(before, labels)
    torch.testing.assert_close(losses.double(), wanted, rtol=1e-6, atol=2e-6)
    assert (logits.double() - gradient).abs().max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("shift", [-3e4, 3e4])
def test_cross_entropy_of_large_logits_is_finite(shift):
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 9000) + shift, torch.tensor([8999, 0, 5])
    logits[2, 8999] += 500.0  # The last block has by far the largest.
    wanted, gradient = cross_entropy(logits, labels)
    losses = torch.empty(3)
    cross_entropy_(logits, labels, losses, True)
    torch.testing.assert_close(losses.double(), wanted, rtol=1e-6, atol=5e-3)
    torch.testing.assert_close(logits.double(), gradient, rtol=5e-3, atol=1e-6)


def test_cross_entropy_of_unknown_label_is_nan():
    logits, labels, losses = (
        torch.randn(5, 200),
        torch.tensor([0, 200, -1, -101, 255]),
        torch.empty(5),
    )
    cross_entropy_(logits, labels, losses, True)
    assert losses.isnan().tolist() == [False] + 4 * [True]
    assert logits[1:].isnan().all() and logits[0].isfinite().all()


@pytest.mark.parametrize("dtype", BOUNDS_OF_ROWS)
@pytest.mark.parametrize("shape", [(2, 5, 24), (3, 7, 64), (1, 0, 8)])
def test_norms_and_sum_of_a_parallel_block_equal_their_definitions(shape, dtype, monkeypatch):
    """A program of the backward pass has several rows, and the last ones fewer."""
    monkeypatch.setattr(parallel_triton, "PROGRAMS", 4)
    torch.manual_seed(0)
    norms = [torch.nn.LayerNorm(shape[-1], eps=1e-3, dtype=dtype) for _ in range(2)]
    weights = [w for norm in norms for w in norm.parameters()]
    for weight in weights:
        torch.nn.init.normal_(weight)
    leaves = [(2 * torch.randn(shape) + k).to(dtype).requires_grad_() for k in range(3)]
    residual, *read = parallel.two_norms(leaves[0], *norms)
    out = parallel.add_branches(read[0] * leaves[1], read[1] * leaves[2], residual)
    assert "TwoNorms" in type(residual.grad_fn).__name__
    found = with_gradients([*read, out], [*leaves, *weights], dtype)
    x, first, second, w1, b1, w2, b2 = same = exact([*leaves, *weights])
    plain = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-3).sqrt()
    y1, y2 = plain * w1 + b1, plain * w2 + b2
    wanted = with_gradients([y1, y2, y1 * first + y2 * second + x], same)
    assert_close(found, wanted, BOUNDS_OF_ROWS[dtype])


def test_norms_that_something_has_changed_are_computed_by_themselves():
    x = torch.randn(2, 8, requires_grad=True)
    plain, hooked = torch.nn.LayerNorm(8), torch.nn.LayerNorm(8)
    hooked.register_forward_hook(lambda *_: None)
    others = [hooked, torch.nn.RMSNorm(8), torch.nn.LayerNorm(8, eps=1e-3)]
    others += [torch.nn.LayerNorm(8, elementwise_affine=False), torch.nn.LayerNorm(8, bias=False)]
    assert parallel.two_norms(x, plain, torch.nn.LayerNorm(8))[0] is not x
    for other in others:
        assert parallel.two_norms(x, plain, other)[0] is x
    with torch.no_grad():
        assert parallel.two_norms(x, plain, torch.nn.LayerNorm(8))[0] is x


@pytest.mark.parametrize("dtype", BOUNDS_OF_ROWS)
@pytest.mark.parametrize("shape", [(2, 37, 53), (1, 600), (0, 8)])
def test_gelu_with_bias_equals_its_definition_with_gradients(shape, dtype, monkeypatch):
    """Stripes have several steps of rows, and the last one fewer; columns are two programs'."""
    monkeypatch.setattr(gelu_triton, "STRIPES", 3)
    torch.manual_seed(0)
    leaves = [2 * torch.randn(shape), torch.randn(shape[-1:])]
    leaves = [x.to(dtype).requires_grad_() for x in leaves]
    found = with_gradients([gelu_with_bias(*leaves)], leaves, dtype)
    product, bias = same = exact(leaves)
    total = product + bias
    wanted = with_gradients([0.5 * total * (1 + torch.erf(total / 2**0.5))], same)
    assert_close(found, wanted, BOUNDS_OF_ROWS[dtype])


def test_trial_kernel_runs_and_its_numbers_are_compared(monkeypatch):
    cpu = torch.device("cpu")
    assert why_no_kernel(cpu) is None
    monkeypatch.setattr("cat_lm.ops.convolution.triton.convolve", lambda kind, x, *_: x.clone())
    assert why_no_kernel(cpu) == "a Triton kernel runs and computes wrong numbers on this device"


def test_sums_over_many_tiles_of_a_program_equal_reference(monkeypatch):
    """A long row gives each program several tiles, and the programs different numbers of them."""
    monkeypatch.setattr("cat_lm.ops.convolution.triton.launch.PROGRAMS", 2)
    torch.manual_seed(0)
    leaves = [torch.randn(s).bfloat16().requires_grad_() for s in ((3, 130, 2, 16), (2, 5))]
    y = ops.head_conv(*leaves, backend="triton")
    same = exact(leaves)
    wanted = with_gradients([reference.convolve("head", *same)], same)
    assert_close(with_gradients([y], leaves, torch.bfloat16), wanted, BOUNDS[torch.bfloat16])
