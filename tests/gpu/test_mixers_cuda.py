"""Mixers on a CUDA GPU: as on the CPU; flash-linear-attention's operators as torch's."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from cat_lm import mixers
from cat_lm.mixers import Setting, make_mixer
from cat_lm.model.context import Context
from cat_lm.ops.recurrence import backends
from cat_lm.ops.recurrence import decaying_scan as _scan
from cat_lm.ops.recurrence.decaying_scan import EVERY, decaying_scan
from tests.cat_lm.architectures.test_families import model_of, tokens
from tests.gpu.scans import SHAPES, by, in_torch, inputs, state_of, with_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def layer_and_input(specification: str, time: int) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layer = make_mixer(specification).build(Setting(64, layer=1, num_layers=2)).eval()
    return layer, torch.randn(3, time, 64)


def results(layer: torch.nn.Module, x: torch.Tensor, device: str) -> list[torch.Tensor]:
    """Output and gradients, on the CPU."""
    layer, x = layer.to(device), x.to(device).requires_grad_()
    y = layer(x, Context())
    weights = torch.linspace(-1, 2, y.numel(), device=device).view_as(y)
    found = torch.autograd.grad((y * weights).sum(), (x, *layer.parameters()))
    return [s.detach().cpu() for s in (y, *found)]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Of each tensor 1e-4; one that is zero but for rounding may be another such zero.

    So are the gradients of linear attention's queries where a token reads itself alone.
    """
    rounding = 1e-6 * max(other.norm() for other in wanted)
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        limit = rounding if other.norm() < rounding else 1e-4 * other.norm()
        assert (one - other).norm() <= limit, f"tensor {index}"


@pytest.mark.parametrize("time", [1, 67])
@pytest.mark.parametrize("name", mixers.names())
def test_mixers_are_the_same_on_the_gpu(name, time):
    layer, x = layer_and_input(name, time)
    wanted = results(layer, x, "cpu")
    same(results(layer, x, "cuda"), wanted)


FLA = {
    "gla": backends.GLA,
    "delta_net": backends.DELTA_RULE,
    "gated_deltanet": backends.GATED_DELTA_RULE,
}


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="fla-core is not installed")
@pytest.mark.parametrize("family", FLA)
def test_operators_of_fla_are_near_ours(family):
    """In bf16, which both round, with documents; auto takes them."""
    assert backends.choose_backend(FLA[family], "cuda", torch.bfloat16).name == "fla"
    model, rows = model_of(family).to("cuda", torch.bfloat16), tokens(2, 160).cuda()
    documents, found = torch.arange(160, device="cuda").expand(2, -1) // 70, []
    for backend in ("torch", "fla"):
        model.set_mixer_backend(backend)
        model.zero_grad()
        logits = model(rows, document_ids=documents).logits.float()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows.flatten()).backward()
        found.append([s.detach().float() for s in (logits, *(p.grad for p in model.parameters()))])
    for index, (wanted, other) in enumerate(zip(*found, strict=True)):
        assert (other - wanted).norm() <= 0.1 * wanted.norm() + 1e-6, f"tensor {index}"
    with torch.no_grad():
        text = model.generate(rows[:, :9], max_new_tokens=5, eos_token_id=None)
    assert text.shape == (2, 14)


def like(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """As fp64 on the CPU: fp32 sums in another order."""
    found = found.detach().cpu().double()
    assert (found - wanted).norm() <= 2e-5 * wanted.norm() + 1e-6


@pytest.mark.parametrize("time", [1, EVERY, 2 * EVERY + 3, 1030])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_scans_kernels_are_the_recurrence(shape, time):
    pytest.importorskip("triton", reason="triton is not installed")
    torch.manual_seed(time)
    given = with_state(inputs(*SHAPES[shape], time))
    grads = [torch.randn(2, 3, time, 2, 5), state_of(given)]
    wanted = in_torch(given, grads)
    leaves, grads = ([s.cuda() for s in tensors] for tensors in (given, grads))
    kernels = _scan._kernels("auto", *leaves)
    assert kernels is _scan.decaying_scan_triton
    # The same twice: sums are in a fixed order.
    first, again = (by(kernels, leaves, grads) for _ in range(2))
    for one, same_one, other in zip(first, again, wanted, strict=True):
        assert torch.equal(one, same_one)
        like(one, other)


# H, K, V; sizes of the rate; of a; warps and programs of a head.
WIDE = {
    "many columns": ((1, 16, 200), (1, 200), (1, 16, 200), (1, 7)),
    "several warps, sums in parts": ((2, 40, 70), (40, 1), (1, 1, 1), (4, 3)),
    "many keys": ((2, 600, 20), (1, 1), (2, 600, 1), (8, 5)),
}


@pytest.mark.parametrize("kind", WIDE)
def test_large_states_are_shared_among_warps_and_programs(kind):
    pytest.importorskip("triton", reason="triton is not installed")
    (heads, keys, values), rate, a, (warps, programs) = WIDE[kind]
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 67, heads, keys, device="cuda")
    v = torch.randn(4, 67, heads, values, device="cuda")
    leaves = [
        q,
        k,
        v,
        torch.rand(4, 67, heads, *rate, device="cuda"),
        -torch.rand(a, device="cuda"),
    ]
    chunks, options = _scan.decaying_scan_triton._launch(
        EVERY, *(leaves[i][None] for i in (0, 2, 3, 4))
    )
    assert (options["num_warps"], chunks) == (warps, programs)
    double = [s.cpu().double().requires_grad_() for s in leaves]
    leaves = [s.requires_grad_() for s in leaves]
    found, wanted = decaying_scan(*leaves), decaying_scan(*double)
    like(found, wanted.detach())
    found.square().sum().backward()
    wanted.square().sum().backward()
    for one, other in zip(leaves, double, strict=True):
        like(one.grad, other.grad)


def test_stacked_scans_are_those_of_single_models():
    torch.manual_seed(0)
    given = [s.cuda() for s in inputs(*SHAPES["mamba's"], 37)]
    scored = torch.func.grad(lambda *s: decaying_scan(*s).square().sum(), tuple(range(5)))
    alone = [scored(*(s[m] for s in given)) for m in range(2)]
    for found, *wanted in zip(torch.func.vmap(scored)(*given), *alone, strict=True):
        like(found, torch.stack(wanted).cpu().double())
