"""Memory of the delta rule, and documents for the operators of flash-linear-attention."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.ops.recurrence import delta_rule, fla
from cat_lm.ops.recurrence.decaying_scan import decaying_scan
from cat_lm.ops.recurrence.delta_rule import CHUNK

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
