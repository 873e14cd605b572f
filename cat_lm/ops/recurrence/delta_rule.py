"""Compute the (gated) delta rule in chunks: time and memory are linear in T.

    S_t = α_t S_{t−1} (I − β_t k_t k_t^T) + β_t v_t k_t^T,   o_t = S_t q_t / √d_k

Within a chunk, with u_t = β_t (v_t − α_t S_{t−1} k_t), Γ_ts = α_{s+1} … α_t, and the state S_0
before the chunk, this is the triangular system

    (I + strictly lower(β_t Γ_ts k_t·k_s)) u = β_t v_t − β_t Γ_t0 S_0 k_t
    o_t = (Γ_t0 S_0 q_t + Σ_{s≤t} Γ_ts (q_t·k_s) u_s) / √d_k,   S_C = Γ_C0 S_0 + Σ_s Γ_Cs u_s k_s^T

All chunks are solved at once for both parts of the right side; what goes from one chunk to the next
is a state. Between documents Γ is 0.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.ops.recurrence import CHUNK
from cat_lm.ops.runtime.documents import check_document_ids, document_runs
from cat_lm.ops.runtime.flops import flops
from cat_lm.ops.runtime.precision import without_autocast

# The exp of these is 0 exactly, as of all that is less.
_TOTAL = {torch.float32: -104.0, torch.float64: -746.0}


def _flops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    **how: object,
) -> float:
    """Count 6 operations for each number of the state, and 1 for its decay."""
    return (6.0 if log_decay is None else 7.0) * q.numel() * v.shape[-1]


@flops(_flops)
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    document_ids: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute o [B, T, H, V], and the last state if asked for.

    It may be batched with torch.func.vmap. Sums and states are in the widest dtype given, at least
    fp32, to which the inputs are cast; o has the dtype of v.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, H, V].
        beta: [B, T, H].
        log_decay: log α, [B, T, H], at most 0, −inf for none of the state; none: α = 1.
        document_ids: [B, T] integers; no document reads another. The first one of a row goes on
            from `initial_state`.
        initial_state: S_0 with its keys first, [B, H, K, V]; none: zeros.
        return_state: whether to return (o, S_T), the state in the dtype of the sums.

    Raises:
        ValueError: other shapes.
    """
    _check(q, k, v, beta, log_decay, initial_state)
    given = [s for s in (q, k, v, beta, log_decay, initial_state) if s is not None]
    widest = functools.reduce(torch.promote_types, (s.dtype for s in given), torch.float32)
    time, chunk = q.shape[1], max(1, min(CHUNK, q.shape[1]))
    q = q.to(widest) * q.shape[-1] ** -0.5
    q, k, v = (_split_chunks(s.to(widest), chunk) for s in (q, k, v))
    beta = _split_chunks(beta.to(widest)[..., None], chunk)
    if log_decay is not None:
        log_decay = _split_chunks(log_decay.to(widest)[..., None], chunk)
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    if initial_state is not None:
        state = initial_state.to(widest)
    if document_ids is not None:
        check_document_ids(document_ids, *given[0].shape[:2])
    starts_empty = initial_state is None and q.shape[2] == 1  # A single step reads no state.
    with without_autocast(q):
        within, before = _chunk_decays(q, log_decay, document_ids if time else None)
        y, state = _solve_chunks(q, k, v, beta, within, before, state, starts_empty)
    y = y.flatten(2, 3)[:, :, :time].transpose(1, 2).to(given[2].dtype)
    return (y, state) if return_state else y


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
) -> None:
    fits = q.dim() == v.dim() == 4 and k.shape == q.shape and v.shape[:3] == q.shape[:3]
    fits = fits and all(s is None or s.shape == q.shape[:3] for s in (beta, log_decay))
    if not fits:
        shapes = ", ".join(str(list(s.shape)) for s in (q, k, v, beta))
        raise ValueError(f"q, k, v, beta and log_decay do not fit each other: {shapes}")
    state = (q.shape[0], *q.shape[2:], v.shape[-1])
    if initial_state is not None and initial_state.shape != state:
        raise ValueError(f"initial_state is {list(initial_state.shape)}, not {list(state)}")


def _split_chunks(x: Tensor, chunk: int) -> Tensor:
    """Split [B, T, H, D] into [B, H, N, C, D]; zeros at the end leave the state unchanged."""
    x = F.pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % chunk))
    x = x.contiguous()  # Copy it once; otherwise every product makes and keeps a copy.
    return x.unflatten(2, (x.shape[2] // chunk, chunk))


def _chunk_decays(
    like: Tensor, log_decay: Tensor | None, document_ids: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Compute Γ between the steps of a chunk and from the state before it to each of them.

    Args:
        like: any stream, [B, H, N, C, D].
        log_decay: [B, H, N, C, 1].

    Returns:
        Γ_ts [B, H or 1, N, C, C] and Γ_t0 [B, H or 1, N, C, 1]; none where all are 1.
    """
    number, chunk = like.shape[2:4]
    if log_decay is None and document_ids is None:
        return None, None
    time = torch.arange(chunk, device=like.device)
    together, goes_on = time[:, None] >= time, None
    if document_ids is not None:
        runs = document_runs(document_ids)
        runs = F.pad(runs[:, None], (0, number * chunk - runs.shape[1]), mode="replicate")
        runs = runs.view(-1, 1, number, chunk, 1)
        # The last values of the previous chunk; 0 for the first one.
        last = F.pad(runs[:, :, :-1, -1:], (0, 0, 0, 0, 1, 0))
        together, goes_on = together & (runs == runs.mT), (runs == last).to(like.dtype)
    if log_decay is None:
        return together.to(like.dtype), goes_on
    # A sum that a very large one is part of would round the others away, and −inf give NaN.
    log_decay = log_decay.clamp(min=_TOTAL[log_decay.dtype])
    if goes_on is None:
        before = log_decay.cumsum(dim=3)
    else:  # Sum decays per document, so that other documents do not affect rounding.
        own = together.to(like.dtype).squeeze(1) @ log_decay.squeeze(-1).permute(0, 2, 3, 1)
        before = own.permute(0, 3, 1, 2)[..., None]
    within = (before - before.mT).masked_fill(~together, -torch.inf).exp()
    before = before.exp()
    return within, before if goes_on is None else before * goes_on


def _solve_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    within: Tensor | None,
    before: Tensor | None,
    state: Tensor,
    starts_empty: bool,
) -> tuple[Tensor, Tensor]:
    """Solve all chunks and carry the state: outputs [B, H, N, C, V] and the last state."""
    products, scores = k @ k.mT, q @ k.mT
    if within is not None:
        products, scores = products * within, scores * within
    to_end = k if within is None else k * within[..., -1:, :].mT  # Γ_Cs k_s
    system = (beta * products).tril(-1)
    right = beta * v
    if not starts_empty:
        reading = k if before is None else k * before
        q = q if before is None else q * before
        right = torch.cat([right, beta * reading], dim=-1)
    u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    scores = scores.tril()
    if starts_empty:
        return scores @ u, (to_end.mT @ u).squeeze(2)
    u, w = u.split([v.shape[-1], k.shape[-1]], dim=-1)
    outputs = []
    for i in range(q.shape[2]):
        moved = u[:, :, i] - w[:, :, i] @ state
        outputs.append(q[:, :, i] @ state + scores[:, :, i] @ moved)
        kept = state if before is None else state * before[:, :, i, -1:]
        state = kept + to_end[:, :, i].mT @ moved
    return torch.stack(outputs, dim=2) if outputs else torch.empty_like(v), state
