"""Contracts of recurrences along time: the decaying scan by each backend, and the delta rule."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.contracts.operators import (
    CHUNK,
    EVERY,
    INTERPRETED,
    assert_close,
    decaying_scan,
    delta_rule,
    exact,
    recurrence_backends,
    serving,
    with_gradients,
)
from tests.contracts.pairs import pairwise
from tests.reference import recurrences as reference

HEADS, KEYS, VALUES = 2, 3, 5
# Sizes of the rate (K, V) and of a (H, K, V): Mamba's, GLA's, Mamba 2's, all, and mixtures.
RATES = {
    "mamba": ((1, 5), (1, 3, 5)),
    "gla": ((3, 1), (1, 1, 1)),
    "mamba2": ((1, 1), (2, 1, 1)),
    "all": ((3, 5), (2, 3, 5)),
    "keys": ((1, 5), (2, 3, 1)),
    "one rate": ((1, 1), (1, 3, 5)),
}
BACKENDS = serving(
    lambda name: recurrence_backends.choose_backend(
        recurrence_backends.SELECTIVE_SCAN, "cpu", torch.float32, name
    ),
    recurrence_backends.SELECTIVE_SCAN.backends,
)
RULES = ["delta", "gated delta"]
# Each recurrence, with what computes it.
CASES = [(kind, name) for kind in RATES for name in BACKENDS] + [(kind, "torch") for kind in RULES]
FEW = [case for case in CASES if case[0] in ("mamba", "gla", *RULES)]
few = pytest.mark.parametrize(("kind", "backend"), FEW)


def draw(kind: str, time: int, rows: int = 2) -> list[Tensor]:
    """Return leaves of a recurrence in fp32: streams [B, T, …], and a of a scan."""
    torch.manual_seed(time)
    q, k = torch.randn(2, rows, time, HEADS, KEYS)
    v = torch.randn(rows, time, HEADS, VALUES)
    if kind in RULES:
        beta, decay = torch.rand(2, rows, time, HEADS)
        streams = [q, F.normalize(k, dim=-1), v, beta, -2 * decay]
        return [s.requires_grad_() for s in streams[: 4 + (kind == "gated delta")]]
    rate, a = RATES[kind]
    streams = [q, k, v, torch.rand(rows, time, HEADS, *rate), -0.1 - 3 * torch.rand(a)]
    return [s.requires_grad_() for s in streams]


def operator(kind: str, backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the recurrence as it gives its last state as well."""
    if kind in RULES:
        return lambda *s, **how: delta_rule(*s, return_state=True, **how)
    return lambda *s, **how: decaying_scan(*s, return_state=True, backend=backend, **how)


def defined(kind: str, streams: list[Tensor], ids: Tensor | None, state: Tensor | None):
    definition = reference.delta_rule if kind in RULES else reference.decaying_scan
    return definition(*streams, documents=ids, state=state)


def cut(kind: str, streams: list[Tensor], part: slice) -> list[Tensor]:
    """Return a part of the time of all streams; a scan's a has no time."""
    return [s[:, part] if kind in RULES or i < 4 else s for i, s in enumerate(streams)]


def ids_of(time: int) -> Tensor:
    """Return documents of one token, that end where states are kept and chunks end, and others."""
    borders = [{1, 2, 5, EVERY, 2 * EVERY, CHUNK}, {CHUNK + 3, 7}]
    return torch.tensor([[sum(t >= b for b in row) for t in range(time)] for row in borders])


TIMES = {"short": [EVERY + 2, 1, EVERY, 5], "long": [2 * EVERY + 3, 1, EVERY, CHUNK + 9]}
TABLE = pairwise(
    {
        "time": [0, 1, 2, 3],
        "documents": [True, False],
        "state": [True, False],
        "dtype": [torch.float32, torch.float64],
    },
)


# The interpreter is slow: one row of the table for most shapes.
ROWS = [
    (*case, row)
    for case in CASES
    for row in TABLE
    if case[1] != "triton" or row is TABLE[0] or (case in FEW and row["dtype"] != torch.float64)
]


def name_of(value: str | dict) -> str:
    return value if isinstance(value, str) else " ".join(map(str, value.values()))


@pytest.mark.parametrize(("kind", "backend", "row"), ROWS, ids=name_of)
def test_recurrence_equals_reference_with_gradients(kind, backend, row):
    time, dtype = TIMES["short" if backend == "triton" else "long"][row["time"]], row["dtype"]
    leaves = [s.detach().to(dtype).requires_grad_() for s in draw(kind, time)]
    if dtype == torch.float64 and backend == "cpu":
        with pytest.raises(ValueError, match="it has no fp64"):
            operator(kind, backend)(*leaves)
        return
    state, ids = None, ids_of(time) if row["documents"] else None
    if row["state"]:
        state = torch.randn(2, HEADS, KEYS, VALUES).to(dtype).requires_grad_()
        leaves.append(state)
    streams = leaves[:-1] if row["state"] else leaves
    results = operator(kind, backend)(*streams, document_ids=ids, initial_state=state)
    same = exact(leaves)
    wanted = defined(kind, same[: len(streams)], ids, same[-1] if row["state"] else None)
    bound = 2e-5 if dtype == torch.float32 else 1e-9
    assert_close(with_gradients(results, leaves), with_gradients(wanted, same), bound)


@pytest.mark.parametrize("cuts", [[5, 1, 13], [1] * 3 + [16]], ids=str)
@few
def test_chunks_with_state_equal_whole_forwards_and_backwards(kind, backend, cuts):
    leaves, state, outputs, start = draw(kind, 19), None, [], 0
    for length in cuts:
        part = cut(kind, leaves, slice(start, start + length))
        y, state = operator(kind, backend)(*part, initial_state=state)
        outputs.append(y)
        start += length
    same = exact(leaves)
    wanted = with_gradients(defined(kind, same, None, None), same)
    assert_close(with_gradients([torch.cat(outputs, 1), state], leaves), wanted, 2e-5)


@few
def test_document_changes_no_bit_of_another(kind, backend):
    """Not even where what it leaves is as large as fp32 can hold; nor does its gradient."""
    time, border = (9, 4) if backend == "triton" else (2 * CHUNK, CHUNK // 2)
    streams = [s.detach() for s in draw(kind, time)]
    ids, found = (torch.arange(time) >= border).long().expand(2, -1), []
    for large in (1.0, 1e30):
        first = torch.where(ids == 0, large, 1.0)[..., None, None]
        leaves = [s.clone() for s in streams]
        leaves[2] = (leaves[2] * first).requires_grad_()
        y, last = operator(kind, backend)(*leaves, document_ids=ids)
        (slope,) = torch.autograd.grad((y[:, border:]).sum() + last.sum(), leaves[2])
        assert not slope[:, :border].any()
        found.append((y[:, border:], last))
    assert all(map(torch.equal, *found))


@few
def test_total_decay_is_a_document(kind, backend):
    if kind == "delta":  # has no decay
        return
    found, at = [], 5
    for total in (False, True):
        streams = [s.detach().clone() for s in draw(kind, 12)]
        ids = (torch.arange(12) >= at).long().expand(2, -1)
        if total:
            streams[4 if kind in RULES else 3][:, at] = -torch.inf if kind in RULES else 1e30
        leaves = [s.requires_grad_() for s in streams]
        results = operator(kind, backend)(*leaves, document_ids=None if total else ids)
        found.append(with_gradients(results, leaves))
        assert all(s.isfinite().all() for s in found[-1])
    assert_close(found[1][:2], found[0][:2], 1e-4 if kind in RULES else 1e-6)


@few
def test_steps_without_rate_or_key_leave_the_state(kind, backend):
    """So that padding on the right costs nothing; and no steps leave it as well."""
    time, end = (CHUNK + 9, CHUNK + 2) if kind in RULES else (13, 9)
    streams, state = [s.detach() for s in draw(kind, time)], torch.randn(2, HEADS, KEYS, VALUES)
    for stream in (streams[1], *streams[3 : 5 if kind in RULES else 4]):
        stream[:, end:] = 0
    run = operator(kind, backend)
    _, last = run(*streams, initial_state=state)
    assert torch.equal(last, run(*cut(kind, streams, slice(end)), initial_state=state)[1])
    y, same = run(*cut(kind, streams, slice(0)), initial_state=state)
    assert y.shape == (2, 0, HEADS, VALUES) and torch.equal(same, state)


@pytest.mark.parametrize("empty", ["rows", "time"])
@few
def test_nothing_recurs_to_nothing(kind, backend, empty):
    leaves = draw(kind, *{"rows": (4, 0), "time": (0, 2)}[empty])
    y, last = operator(kind, backend)(*leaves)
    assert y.shape == leaves[2].shape and not y.any() and not last.any()
    total = y.sum() + last.sum()
    if total.requires_grad:
        found = torch.autograd.grad(total, leaves, allow_unused=True)
        assert not any(g.any() for g in found if g is not None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@few
def test_half_precision_is_summed_in_fp32(kind, backend, dtype):
    """In autocast too, and with documents, whose borders fp16 cannot hold."""
    leaves, ids = [s.detach().to(dtype).requires_grad_() for s in draw(kind, 19)], ids_of(19)
    run = operator(kind, backend)
    y, last = run(*leaves, document_ids=ids)
    whole, state = run(*(s.float() for s in leaves), document_ids=ids)
    assert torch.equal(y, whole.to(dtype)) and last.dtype == torch.float32
    assert torch.equal(last, state)
    found = torch.autograd.grad(y.float().sum() + last.sum(), leaves)
    assert all(s.isfinite().all() and s.dtype == dtype for s in found)
    same = exact(leaves)
    wanted = defined(kind, same, ids, None)
    wanted = torch.autograd.grad(wanted[0].sum() + wanted[1].sum(), same)
    assert_close(found, wanted, 1e-2)
    with torch.autocast("cpu", torch.bfloat16):
        inside = run(*(s.float() for s in leaves), document_ids=ids)
    assert torch.equal(inside[0], whole) and torch.equal(inside[1], state)


@few
def test_decays_from_none_to_total_stay_exact(kind, backend):
    if kind == "delta":
        return
    leaves = [s.detach() for s in draw(kind, 12 if backend == "triton" else 500, 1)]
    place = 4 if kind in RULES else 3
    leaves[place] = 200 * leaves[place] ** 7
    leaves = [s.requires_grad_() for s in leaves]
    same = exact(leaves)
    found = with_gradients(operator(kind, backend)(*leaves), leaves)
    wanted = with_gradients(defined(kind, same, None, None), same)
    assert_close(found, wanted, 1e-4 if kind in RULES else 2e-5)


@few
def test_same_bits_twice_and_with_more_threads_and_any_strides(kind, backend):
    # Of 1,200 steps the C++ kernel takes more than one thread.
    time = {"triton": 6, "cpu": 1200}.get(backend, 150)
    leaves, before = draw(kind, time), torch.get_num_threads()
    run, found = operator(kind, backend), []
    turned = [s.transpose(0, -1).contiguous().transpose(0, -1) for s in leaves]
    try:
        for threads, streams in ((1, leaves), (1, leaves), (3, leaves), (1, turned)):
            torch.set_num_threads(threads)
            found.append(with_gradients(run(*streams), leaves))
    finally:
        torch.set_num_threads(before)
    for other in found[1:3]:
        assert all(map(torch.equal, found[0], other))
    assert_close(found[3], found[0], 1e-5)


@few
def test_vmap_equals_loop_forwards_and_backwards(kind, backend):
    models, ids = draw(kind, 9), ids_of(9)
    leaves = [torch.stack([s.detach(), 0.9 * s.detach()]).requires_grad_() for s in models]

    def run(*streams: Tensor) -> tuple[Tensor, Tensor]:
        return operator(kind, backend)(*streams, document_ids=ids)

    alone = [run(*(s[i] for s in leaves)) for i in range(2)]
    alone = [torch.stack(parts) for parts in zip(*alone, strict=True)]
    found = torch.func.vmap(run)(*leaves)
    assert_close(with_gradients(found, leaves), with_gradients(alone, leaves), 1e-5)
    shared = [leaves[0], *models[1:]]
    found = torch.func.vmap(run, (0, *[None] * len(models[1:])))(*shared)[0]
    alone = torch.stack([run(q, *models[1:])[0] for q in leaves[0]])
    assert_close(with_gradients([found], shared), with_gradients([alone], shared), 1e-5)


@few
def test_traced_once_and_differentiated_once(kind, backend):
    leaves, run = draw(kind, 9), operator(kind, backend)
    compiled = torch.compile(lambda *s: run(*s)[0], fullgraph=True, backend="aot_eager")
    whole = with_gradients([run(*leaves)[0]], leaves)
    assert_close(with_gradients([compiled(*leaves)], leaves), whole, 1e-6)
    if kind in RULES:
        return
    with pytest.raises((RuntimeError, NotImplementedError)):
        first = torch.autograd.grad(run(*leaves)[0].square().sum(), leaves, create_graph=True)
        sum(s.square().sum() for s in first).backward()


WRONG = {1: lambda k: k[:, :, :1], 2: lambda v: v[:, :1], 3: lambda rate: rate[:1]}


@pytest.mark.parametrize("place", WRONG)
@few
def test_refuses_what_does_not_fit(kind, backend, place):
    streams = [s.detach() for s in draw(kind, 5)]
    run = operator(kind, backend)
    with pytest.raises(ValueError, match="document_ids"):
        run(*streams, document_ids=torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="initial_state"):
        run(*streams, initial_state=torch.zeros(2, HEADS, VALUES, KEYS))
    streams[place] = WRONG[place](streams[place])
    with pytest.raises(ValueError, match="do not fit each other"):
        run(*streams)


def test_every_named_backend_serves_or_is_an_error():
    names = ("SELECTIVE_SCAN", "GLA", "DELTA_RULE", "GATED_DELTA_RULE")
    for row in (getattr(recurrence_backends, name) for name in names):
        assert set(row.backends) <= set(recurrence_backends.NAMES)
        for name in recurrence_backends.NAMES:
            for device in ("cpu", "cuda", "meta"):
                try:
                    found = recurrence_backends.choose_backend(row, device, torch.float32, name)
                except ValueError as error:
                    assert f"backend={name!r} cannot serve {row.title}" in str(error)
                else:
                    assert found.name == name and name in row.backends
        with pytest.raises(ValueError, match="backend='fast': must be one of auto"):
            recurrence_backends.choose_backend(row, "cpu", torch.float32, "fast")
    with pytest.raises(ValueError, match="backend='fla' cannot serve"):
        decaying_scan(*draw("gla", 3), backend="fla")
    assert ("triton" in BACKENDS) == INTERPRETED
