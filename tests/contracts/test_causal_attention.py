"""Contracts of attention's kernel for training on a CPU, and when models take it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cat_lm.model.attention import core
from cat_lm.ops.attention import causal_cpu
from cat_lm.ops.runtime.compiler import Library
from tests.contracts.operators import BOUNDS, assert_close, exact, with_gradients
from tests.tiny_models import cat_model, random_ids


def reference(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    scores = scale * query @ key.mT
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(later, -torch.inf).softmax(dim=-1) @ value).transpose(1, 2)


def draw(time: int, width: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return streams [2, 3, T, D], views of one packed projection, with scores of some size."""
    torch.manual_seed(0)
    packed = 2 * torch.randn(2, time, 3, 3, width).to(dtype)
    return [packed[:, :, :, i].transpose(1, 2).requires_grad_() for i in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("time", "width"), [(64, 64), (65, 8), (77, 24), (200, 80)])
def test_attention_equals_its_definition_with_gradients(time, width, dtype):
    streams, scale = draw(time, width, dtype), 1.5 * width**-0.5
    found = with_gradients([causal_cpu.causal_attention(*streams, scale)], streams, dtype)
    doubles = exact(streams)
    wanted = with_gradients([reference(*doubles, scale)], doubles, dtype)
    assert {one.dtype for one in found} == {dtype}
    assert_close(found, wanted, BOUNDS[dtype])


def test_a_row_of_equal_or_huge_scores_stays_finite():
    query, key, value = draw(130, 16)
    huge = [300 * query.detach(), 300 * key.detach(), value.detach()]
    for streams in (huge, [0 * query.detach(), key.detach(), value.detach()]):
        leaves = [x.requires_grad_() for x in streams]
        found = with_gradients([causal_cpu.causal_attention(*leaves, 0.25)], leaves)
        doubles = exact(leaves)
        wanted = with_gradients([reference(*doubles, 0.25)], doubles)
        assert_close(found[:1], wanted[:1], 1e-5)
        assert all(one.isfinite().all() for one in found)


def test_threads_change_no_bit():
    streams, threads, found = draw(200, 64), torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        found.append(with_gradients([causal_cpu.causal_attention(*streams, 0.1)], streams))
    torch.set_num_threads(threads)
    assert all(map(torch.equal, *found))


def test_second_derivatives_are_refused():
    streams = draw(64, 8)
    out = causal_cpu.causal_attention(*streams, 1.0).sum()
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(out, streams[0], create_graph=True)


def test_stacked_models_are_computed_one_by_one():
    streams = [torch.stack([x.detach(), x.detach().flip(0)]) for x in draw(64, 8)]
    found = torch.vmap(lambda *x: causal_cpu.causal_attention(*x, 0.5))(*streams)
    wanted = [causal_cpu.causal_attention(*(x[i] for x in streams), 0.5) for i in range(2)]
    assert torch.equal(found, torch.stack(wanted))


@pytest.fixture
def taken(monkeypatch):
    calls = []
    attend = causal_cpu.causal_attention
    monkeypatch.setattr(
        core, "causal_attention", lambda *given: calls.append(given) or attend(*given)
    )
    return calls


@pytest.mark.parametrize("autocast", [False, True])
def test_training_takes_the_kernel(autocast, taken, monkeypatch):
    monkeypatch.setattr(causal_cpu, "_has_amx", lambda: False)
    model, ids = cat_model(num_hidden_layers=2).train(), random_ids(2, 80)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(ids, labels=ids).loss.backward()
    assert [x.dtype for x, *_ in taken] == 2 * [torch.bfloat16 if autocast else torch.float32]


@pytest.mark.parametrize(
    "case", ["no gradient", "short", "padding", "dropout", "documents", "eager", "no compiler"]
)
def test_all_else_takes_torchs(case, taken, monkeypatch):
    model, how = cat_model(num_hidden_layers=1).train(), {}
    ids = random_ids(2, 63 if case == "short" else 80)
    if case == "padding":
        how["attention_mask"] = torch.ones_like(ids)
        how["attention_mask"][0, :5] = 0
    elif case == "documents":
        how["document_ids"] = torch.arange(80).expand(2, -1) // 50
    elif case == "dropout":
        model.gpt_neox.layers[0].attention.attention_dropout = 0.1
    elif case == "eager":
        model.set_attn_implementation("eager")
    elif case == "no compiler":
        monkeypatch.setattr(causal_cpu.KERNEL, "library", lambda: Library(None, "no compiler"))
    with torch.set_grad_enabled(case != "no gradient"):
        model(ids, labels=ids, **how)
    assert not taken
