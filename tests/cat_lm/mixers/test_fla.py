"""The linear mixers' operators against flash-linear-attention's own plain definitions of them.

Its files of definitions are loaded by themselves: they need torch and einops alone, while the
package needs a GPU's compiler and seconds to import.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.mixers import Setting, make_mixer
from cat_lm.mixers.kinds.gla import gated_linear_attention
from cat_lm.mixers.parts.linear import linear_attention
from cat_lm.model.context import Context
from cat_lm.ops.recurrence.delta_rule import delta_rule

PACKAGE = importlib.util.find_spec("fla")
pytestmark = pytest.mark.skipif(PACKAGE is None, reason="fla-core is not installed")
TIME = 37


def definitions(operator: str) -> ModuleType:
    path = Path(PACKAGE.submodule_search_locations[0]) / "ops" / operator / "naive.py"
    spec = importlib.util.spec_from_file_location(f"fla_definitions_{operator}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random(*widths: int) -> list[Tensor]:
    """[2, T, 3, width] each."""
    torch.manual_seed(0)
    return [torch.randn(2, TIME, 3, width, requires_grad=True) for width in widths]


def heads_first(*streams: Tensor) -> list[Tensor]:
    return [s.transpose(1, 2) for s in streams]


def same(found: Tensor, wanted: Tensor, leaves: list[Tensor]) -> None:
    """The outputs and all their gradients."""
    assert found.shape == wanted.shape == (2, TIME, 3, leaves[2].shape[-1])
    weights = torch.linspace(-1, 2, found.numel()).view_as(found)
    for one, other in zip(
        (found, *torch.autograd.grad((found * weights).sum(), leaves, retain_graph=True)),
        (wanted, *torch.autograd.grad((wanted * weights).sum(), leaves)),
        strict=True,
    ):
        size = float(other.detach().abs().max())
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5 * max(size, 0.5))


def test_linear_attention():
    leaves = random(6, 6, 5)
    q, k, v = leaves
    q, k = F.elu(q) + 1, F.elu(k) + 1
    theirs = definitions("linear_attn").naive_recurrent_linear_attn
    found = linear_attention(q, k, v, Context())
    same(found, theirs(q, k, v, scale=1.0, normalize=True)[0], leaves)


def test_based():
    leaves = random(4, 4, 5)
    q, k, v = leaves
    layer = make_mixer("based:features=4").build(Setting(16, layer=1, num_layers=2))
    found = linear_attention(layer._map(q), layer._map(k), v, Context())
    theirs = definitions("based").naive_parallel_based(*heads_first(q, k, v))
    same(found, theirs.transpose(1, 2), leaves)


@pytest.mark.parametrize("strength", [1 / 16, 1.0, 30.0])
def test_gated_linear_attention(strength):
    leaves = random(6, 6, 5, 6)
    q, k, v, gate = leaves
    decay = strength * F.logsigmoid(gate)
    theirs = definitions("gla").naive_recurrent_gla(q, k, v, decay)[0]
    same(gated_linear_attention(q, k, v, decay), theirs, leaves)


def test_delta_rule():
    leaves = random(6, 6, 5, 1)
    q, k = (F.normalize(s, dim=-1) for s in leaves[:2])
    v, beta = leaves[2], leaves[3][..., 0].sigmoid()
    theirs = definitions("delta_rule").delta_rule_recurrence(*heads_first(q, k, v, beta))[0]
    same(delta_rule(q, k, v, beta), theirs.transpose(1, 2), leaves)


@pytest.mark.parametrize("strength", [1.0, 16.0])
def test_gated_delta_rule(strength):
    leaves = random(6, 6, 5, 1, 1)
    q, k = (F.normalize(s, dim=-1) for s in leaves[:2])
    v, beta = leaves[2], leaves[3][..., 0].sigmoid()
    decay = -strength * F.softplus(leaves[4][..., 0])
    theirs = definitions("gated_delta_rule").naive_recurrent_gated_delta_rule
    same(delta_rule(q, k, v, beta, decay), theirs(q, k, v, beta, decay)[0], leaves)
