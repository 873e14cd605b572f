"""Documents, states and dtypes of the recurrences: the decaying scan and the delta rule."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.ops.recurrence import decaying_scan as scan_module
from cat_lm.ops.recurrence import decaying_scan_torch, delta_rule, fla
from cat_lm.ops.recurrence.decaying_scan import EVERY, decaying_scan
from cat_lm.ops.recurrence.delta_rule import CHUNK
from tests.unit.scans import delta_rule_at_once

HEADS, KEYS, VALUES = 2, 3, 4


def scan_streams(time: int, rows: int, dtype: torch.dtype, kind: str) -> list[Tensor]:
    q, k = torch.randn(2, rows, time, HEADS, KEYS, dtype=dtype)
    v = torch.randn(rows, time, HEADS, VALUES, dtype=dtype)
    if kind == "gla":
        return [q, k, v, F.logsigmoid(torch.randn(rows, time, HEADS, KEYS, 1, dtype=dtype))]
    return [q, k, v, torch.rand(rows, time, HEADS, 1, VALUES, dtype=dtype)]  # Mamba's Δ


def delta_streams(time: int, rows: int, dtype: torch.dtype, kind: str) -> list[Tensor]:
    q, k = F.normalize(torch.randn(2, rows, time, HEADS, KEYS, dtype=dtype), dim=-1)
    v = torch.randn(rows, time, HEADS, VALUES, dtype=dtype)
    streams = [q, k, v, torch.rand(rows, time, HEADS, dtype=dtype)]
    decay = -2 * torch.rand(rows, time, HEADS, dtype=dtype)
    return [*streams, decay] if kind == "gated delta" else streams


def operator(kind: str, dtype: torch.dtype) -> Callable[..., Tensor]:
    """The recurrence of streams [B, T, …] alone; a is one for all calls."""
    if "delta" in kind:
        return delta_rule.delta_rule
    if kind == "gla":
        a = torch.ones(1, 1, 1, dtype=dtype)
    else:
        a = -torch.linspace(1, 16, HEADS * KEYS * VALUES, dtype=dtype).view(HEADS, KEYS, VALUES)
    return lambda *streams, **how: decaying_scan(*streams, a, **how)


def streams_of(kind: str, time: int, rows: int = 1, dtype=torch.float32) -> list[Tensor]:
    torch.manual_seed(time)
    make = delta_streams if "delta" in kind else scan_streams
    return [s.requires_grad_() for s in make(time, rows, dtype, kind)]


def state_of(rows: int, dtype=torch.float32) -> Tensor:
    return torch.randn(rows, HEADS, KEYS, VALUES, dtype=dtype, requires_grad=True)


def gradients(results: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Of a weighted sum of all results."""
    total = sum(
        (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)).sum() for y in results
    )
    return list(torch.autograd.grad(total, leaves))


KINDS = ["gla", "mamba", "delta", "gated delta"]
SCANS = ["gla", "mamba"]
BORDERS = {
    "one": [37],
    "two": [1, 36],
    "many": [1, 1, EVERY - 2, EVERY, 2 * EVERY + 1],
    "at a chunk's end": [CHUNK, CHUNK + 1, 3],
    "inside chunks": [5, CHUNK + 7, 2, CHUNK],
    "over chunks": [2 * CHUNK + 9, 30],
}


@pytest.fixture(params=["kernel", "torch"])
def backend(request, monkeypatch):
    """fp32 by the C++ kernel where a compiler is, and by plain torch."""
    if request.param == "torch":
        monkeypatch.setattr(scan_module, "_kernels", lambda *_: decaying_scan_torch)


@pytest.mark.parametrize("borders", BORDERS.values(), ids=BORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_documents_alone(kind, borders, backend):
    """A scan's outputs are the same bits; the delta rule's chunks fall on other places."""
    streams = streams_of(kind, sum(borders))
    ids = torch.repeat_interleave(torch.arange(len(borders)), torch.tensor(borders))[None]
    run = operator(kind, torch.float32)
    packed, last = run(*streams, document_ids=ids, return_state=True)
    parts = zip(*(s.split(borders, dim=1) for s in streams), strict=True)
    alone, states = zip(*(run(*part, return_state=True) for part in parts), strict=True)
    alone = torch.cat(alone, dim=1)
    if kind in SCANS:
        assert torch.equal(packed, alone) and torch.equal(last, states[-1])
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, states[-1], rtol=1e-4, atol=1e-5)
    found, wanted = (gradients([y, s], streams) for y, s in ((packed, last), (alone, states[-1])))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    if len(borders) > 1:  # the ids do something
        assert not torch.allclose(run(*streams), packed, rtol=1e-3, atol=1e-3)


def test_documents_leave_the_gradient_of_a_finite_and_right(backend):
    """a is shared by all documents; where a document starts it has no part."""
    q, k, v, rate = streams_of("mamba", 40)
    ids, leaf = torch.arange(40)[None] // 7, -torch.rand(HEADS, KEYS, VALUES)
    found = []
    for parts in ([slice(None)], [slice(i, i + 7) for i in range(0, 40, 7)]):
        a = leaf.clone().requires_grad_()
        how = {"document_ids": ids} if len(parts) == 1 else {}
        ys = [decaying_scan(*(s[:, p] for s in (q, k, v, rate)), a, **how) for p in parts]
        found += gradients([torch.cat(ys, dim=1)], [a])
    assert found[0].isfinite().all()
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("kind", SCANS)
def test_documents_in_half_precision_have_finite_and_right_gradients(kind, backend):
    """Of a too: what cuts documents apart is larger than fp16 can hold."""
    *streams, a = [s.detach().half() for s in (*streams_of(kind, 40), -torch.rand(1, 1, 1))]
    ids, found = torch.arange(40)[None] // 7, []
    if kind == "gla":
        streams[3] = -streams[3]  # so that r ⊙ a ≤ 0
    for cast in (Tensor.half, Tensor.float):
        leaves = [cast(s).requires_grad_() for s in (*streams, a)]
        y = decaying_scan(*leaves, document_ids=ids)
        found.append(torch.autograd.grad(y.float().sum(), leaves))
    for one, other in zip(*found, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one.float(), other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("decay", [-1e6, -1e30, -torch.inf])
@pytest.mark.parametrize("at", [0, 5, CHUNK - 1, CHUNK, CHUNK + 3])
def test_a_total_decay_is_a_document_and_spoils_no_other(at, decay):
    """Of fp32, beside the rest in fp64; gradients too."""
    found = []
    for dtype in (torch.float32, torch.float64):
        streams = [s.detach() for s in streams_of("gated delta", 2 * CHUNK, dtype=torch.float64)]
        streams[4] = streams[4] / 2000  # at most 1e-3
        how = {}
        if dtype == torch.float32:
            streams[4][:, at] = decay
        else:
            ids = (torch.arange(2 * CHUNK) >= at).long()[None]
            how = {"document_ids": ids} if at else {}
        leaves = [s.to(dtype).requires_grad_() for s in streams]
        y, last = delta_rule.delta_rule(*leaves, **how, return_state=True)
        found.append([y, last, *gradients([y, last], leaves)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_document_reaches_another(kind):
    """Not even where what it leaves is as large as fp32 can hold."""
    streams = [s.detach() for s in streams_of(kind, 2 * CHUNK)]
    ids = (torch.arange(2 * CHUNK) >= CHUNK // 2).long()[None]
    run = operator(kind, torch.float32)
    before = run(*streams, document_ids=ids)
    streams[2] = torch.where((ids == 0)[..., None, None], 1e30, streams[2])
    after = run(*streams, document_ids=ids)
    assert torch.equal(after[:, CHUNK // 2 :], before[:, CHUNK // 2 :])


@pytest.mark.parametrize("cut", [0, 1, EVERY, CHUNK - 1, CHUNK, 2 * CHUNK + 2])
@pytest.mark.parametrize("kind", KINDS)
def test_going_on_from_a_state_is_the_whole(kind, cut):
    time = 2 * CHUNK + 3
    streams, state = streams_of(kind, time, 2, torch.float64), state_of(2, torch.float64)
    run = operator(kind, torch.float64)
    whole = run(*streams, initial_state=state, return_state=True)
    first, middle = run(*(s[:, :cut] for s in streams), initial_state=state, return_state=True)
    second, last = run(*(s[:, cut:] for s in streams), initial_state=middle, return_state=True)
    parts = (torch.cat([first, second], dim=1), last)
    for one, other in zip(parts, whole, strict=True):
        torch.testing.assert_close(one, other)
    found, wanted = (gradients(results, [*streams, state]) for results in (parts, whole))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.allclose(whole[0], run(*streams))


@pytest.mark.parametrize("kind", KINDS)
def test_token_by_token_is_the_whole(kind):
    streams, state = [s.detach() for s in streams_of(kind, 20, 2)], None
    run, rows = operator(kind, torch.float32), []
    for t in range(20):
        y, state = run(*(s[:, t : t + 1] for s in streams), initial_state=state, return_state=True)
        rows.append(y)
    whole, last = run(*streams, return_state=True)
    torch.testing.assert_close(torch.cat(rows, dim=1), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_document_goes_on_from_the_state_and_no_other_does(kind):
    streams, state = [s.detach() for s in streams_of(kind, 30, 2)], state_of(2).detach()
    ids = torch.tensor([[5] * 10 + [6] * 20, [1] * 30])
    run = operator(kind, torch.float32)
    packed, last = run(*streams, document_ids=ids, initial_state=state, return_state=True)
    first, _ = run(*(s[:, :10] for s in streams), initial_state=state, return_state=True)
    second, ends = run(*(s[:1, 10:] for s in streams), return_state=True)
    whole, end = run(*(s[1:] for s in streams), initial_state=state[1:], return_state=True)
    for one, other in (
        (packed[:, :10], first),
        (packed[:1, 10:], second),
        (packed[1:], whole),
        (last, torch.cat([ends, end])),
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_without_rate_or_key_leave_the_state_exactly(kind):
    """So that padding on the right costs nothing."""
    streams, state = [s.detach() for s in streams_of(kind, CHUNK + 9, 2)], state_of(2).detach()
    run = operator(kind, torch.float32)
    for stream in streams[1:2] + streams[3:]:
        stream[:, CHUNK + 2 :] = 0
    _, last = run(*streams, initial_state=state, return_state=True)
    _, wanted = run(*(s[:, : CHUNK + 2] for s in streams), initial_state=state, return_state=True)
    assert torch.equal(last, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_recurs_to_the_state_that_was(kind):
    streams, state = streams_of(kind, 0, 2), state_of(2)
    run, ids = operator(kind, torch.float32), torch.zeros(2, 0, dtype=torch.long)
    y, last = run(*streams, initial_state=state, document_ids=ids, return_state=True)
    assert y.shape == (2, 0, HEADS, VALUES) and torch.equal(last, state)
    assert all(g.isfinite().all() for g in gradients([last], [state]))
    assert not run(*streams, return_state=True)[1].any()


@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_in_fp32_at_least(kind):
    """Half precision is cast, and cast back: the rounding of inputs and outputs alone."""
    streams = [s.detach().bfloat16() for s in streams_of(kind, CHUNK + 5, 2)]
    run = operator(kind, torch.float32)
    wanted, last = run(*(s.float() for s in streams), return_state=True)
    found, state = run(*streams, return_state=True)
    assert found.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert torch.equal(found, wanted.bfloat16()) and torch.equal(state, last)
    mixed = [streams[0], *(s.float() for s in streams[1:])]
    assert run(*mixed).dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_does_not_reach_the_sums(kind, backend):
    """It would round the factors of products that fp32 tensors make."""
    streams = streams_of(kind, CHUNK + 5, 2)
    run = operator(kind, torch.float32)
    for documents in (None, (torch.arange(CHUNK + 5) > 9).long().expand(2, -1)):
        wanted = run(*streams, document_ids=documents)
        with torch.autocast("cpu", torch.bfloat16):
            found = run(*streams, document_ids=documents)
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_stacked_models_with_documents_and_states(kind):
    models = [streams_of(kind, time=20) for _ in range(2)]
    models[1] = [s.detach() * 0.9 for s in models[1]]
    ids, run = torch.arange(20)[None] // 6, operator(kind, torch.float32)
    one = lambda *s: run(*s, document_ids=ids, return_state=True)  # noqa: E731
    found = torch.func.vmap(one)(*(torch.stack(s) for s in zip(*models, strict=True)))
    for got, *wanted in zip(found, *(one(*streams) for streams in models), strict=True):
        torch.testing.assert_close(got, torch.stack(wanted))


WRONG = {
    "document_ids": torch.zeros(2, 4, dtype=torch.long),
    "initial_state": torch.zeros(1, HEADS, VALUES, KEYS),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("kind", KINDS)
def test_documents_and_states_that_do_not_fit_are_refused(kind, name):
    with pytest.raises(ValueError, match=name):
        operator(kind, torch.float32)(*streams_of(kind, 5), **{name: WRONG[name]})
    if "delta" in kind:
        q, k, v, beta, *_ = streams_of(kind, 5)
        for wrong in ((q, k[:, :4], v, beta), (q, k, v[:, :, :1], beta), (q, k, v, beta[:, :1])):
            with pytest.raises(ValueError, match="do not fit each other"):
                delta_rule.delta_rule(*wrong)


@pytest.mark.parametrize("time", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
@pytest.mark.parametrize("kind", ["delta", "gated delta"])
def test_chunks_are_the_whole_system(kind, time):
    """Up to a chunk the very same numbers."""
    streams = streams_of(kind, time, 2)
    found, wanted = delta_rule.delta_rule(*streams), delta_rule_at_once(*streams)
    if time <= CHUNK:
        assert torch.equal(found, wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    double = streams_of(kind, time, 2, torch.float64)
    found, wanted = (
        [y, *gradients([y], double)]
        for y in (delta_rule.delta_rule(*double), delta_rule_at_once(*double))
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def kept_bytes(time: int) -> int:
    """What the delta rule keeps for its gradients."""
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        delta_rule.delta_rule(*streams_of("gated delta", time))
    return sum(storage.nbytes() for storage in storages.values())


def test_memory_is_linear_in_length():
    short, long = kept_bytes(4 * CHUNK), kept_bytes(16 * CHUNK)
    assert 3.5 * short < long < 4.5 * short


@pytest.mark.parametrize("kind", ["gla", "delta"])
def test_the_packages_operators_get_documents_as_one_row(kind, monkeypatch):
    """A stand-in that takes what flash-linear-attention's operators take, on a CPU."""

    def stand_in(
        q, k, v, *, gk=None, beta=None, initial_state, output_final_state, cu_seqlens=None
    ):
        gate, absent = (gk, beta) if kind == "gla" else (beta, gk)
        assert absent is None
        streams = [q, k, v, gate[..., None] if kind == "gla" else gate]
        if kind == "gla":
            streams[0] = q * KEYS**-0.5
        run = operator(kind, torch.float32)
        how = {"return_state": True}
        if cu_seqlens is None:
            y, state = run(*streams, initial_state=initial_state, **how)
            return y, state if output_final_state else None
        assert q.shape[0] == 1 and cu_seqlens.dtype == torch.int64
        borders, found = cu_seqlens.tolist(), []
        for i, (start, end) in enumerate(itertools.pairwise(borders)):
            state = None if initial_state is None else initial_state[i : i + 1]
            found.append(run(*(s[:, start:end] for s in streams), initial_state=state, **how))
        y, state = (
            torch.cat(part, dim=d) for part, d in zip(zip(*found, strict=True), (1, 0), strict=True)
        )
        return y, state if output_final_state else None

    name = "gla" if kind == "gla" else "delta_rule"
    package = ModuleType(f"fla.ops.{name}")
    setattr(package, f"fused_recurrent_{name}", stand_in)
    for parent in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setattr(fla, "check_tensor", lambda x: None)
    q, k, v, gate = (s.detach() for s in streams_of(kind, 12, 3))
    theirs = fla.gated_linear_attention if kind == "gla" else fla.delta_rule
    of_fla = (q, k, v, gate.squeeze(-1) if kind == "gla" else gate)
    ours = operator(kind, torch.float32)
    streams = (q * KEYS**-0.5 if kind == "gla" else q, k, v, gate)
    ids = torch.tensor([[0] * 12, [3] * 5 + [4] * 7, [1, 2] * 6])
    for documents in (None, ids):
        for state in (None, state_of(3).detach()):
            how = {"document_ids": documents, "initial_state": state}
            found = theirs(*of_fla, **how, return_state=True)
            for one, other in zip(found, ours(*streams, **how, return_state=True), strict=True):
                torch.testing.assert_close(one, other)
            torch.testing.assert_close(theirs(*of_fla, **how), found[0])
