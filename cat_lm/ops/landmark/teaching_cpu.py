"""Calls of teaching.cpp, the C++ kernel that computes the guided loss on a CPU.

One call gives the loss and its gradients; of operators of torch it would take some eighty, each of
which is small beside waking the threads.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from cat_lm.ops.landmark import calls
from cat_lm.ops.landmark.layout import BlockLayout
from cat_lm.ops.landmark.select import candidates_of
from cat_lm.ops.runtime.operators import refuse_second_derivative

KERNEL = calls.sources("teaching", "teaching.cpp"), "teach_run"

_INTEGERS = ("batch", "heads", "shared", "rows", "count", "width", "block", "layouts")
_STRIDED = ("query", "key", "landmarks")
_POINTERS = (
    *("slots", "starts", "firsts", "first_blocks", "counts", "factors"),
    *("losses", "query_gradient", "landmark_gradient", "factor_gradient"),
)


class _Call(calls.Call):
    """`TeachCall` of teaching.cpp."""

    _fields_ = calls.fields_of(_INTEGERS, _STRIDED, _POINTERS)


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether there is a kernel for tensors of a device and dtype; it may be built now."""
    return calls.has_kernel(*KERNEL, device, dtype)


def can_teach(query: Tensor, key: Tensor, landmarks: Tensor) -> bool:
    """Tell whether the kernel serves; it may be built now."""
    return calls.serves(*KERNEL, query, key, landmarks)


def teach(
    query: Tensor,
    key: Tensor,
    landmarks: Tensor,
    layout: BlockLayout,
    local: int,
    scaling: float,
    sharpness: Tensor | float,
    drawn: Tensor,
) -> Tensor:
    """Compute the guided loss on the queries `drawn` [R], where `can_teach`, a number.

    The other arguments are those of `cat_lm.ops.landmark.teaching.guided_loss`.

    Raises:
        ValueError: tensors that do not fit together.
    """
    _check(query, key, landmarks, layout, local, drawn)
    sharpness = torch.as_tensor(sharpness).expand(query.shape[1])
    drawn = drawn.sort().values  # side by side are those that read about the same keys
    own = layout.of_queries(drawn)
    candidates = candidates_of(own, local)[:, 0]
    # Those of a query follow each other, as do the keys of its document.
    places = {
        "slots": drawn,
        "starts": own.starts,
        "firsts": own.slots - own.positions,
        "first_blocks": candidates.int().argmax(dim=-1) if candidates.shape[2] else own.positions,
        "counts": candidates.sum(dim=-1),
    }
    return _Taught.apply(
        query, key, landmarks, (sharpness * scaling).float(), places, layout.block, scaling
    )


def _check(
    query: Tensor,
    key: Tensor,
    landmarks: Tensor,
    layout: BlockLayout,
    local: int,
    drawn: Tensor,
) -> None:
    """Check what the kernel, which looks at no shape, would read beyond."""
    batch, heads, time, width = query.shape
    shared, count = key.shape[1], layout.starts.shape[1]
    fits = (
        key.shape == (batch, shared, time, width)
        and heads % shared == 0
        and landmarks.shape == (batch, shared, count, width)
        and len(layout.positions) in (1, batch)
        and layout.positions.shape[1] == len(layout.slots) == time
    )
    if not fits or local < 1 or not len(drawn):
        shapes = [list(x.shape) for x in (query, key, landmarks)]
        raise ValueError(
            f"queries, keys and landmarks {shapes} do not fit rows of {len(layout.slots)} tokens "
            f"with {count} blocks, of which at least one is local, or no query was drawn"
        )


class _Taught(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        landmarks: Tensor,
        factors: Tensor,
        places: dict[str, Tensor],
        block: int,
        scaling: float,
    ) -> Tensor:
        batch, heads, _, width = query.shape
        rows, shared, count = len(places["slots"]), key.shape[1], landmarks.shape[2]
        call = _Call(
            0, torch.get_num_threads(), batch, heads, shared, rows, count, width, block,
            len(places["counts"]), scaling=scaling,
        )  # fmt: skip
        of_query, _, of_landmarks, of_factors, *_ = ctx.needs_input_grad
        losses, factor_gradient = torch.empty(2, batch, heads)
        made = {"losses": losses, "factor_gradient": factor_gradient}
        if of_query:
            made["query_gradient"] = torch.empty(batch, rows, heads, width)
        if of_landmarks:
            made["landmark_gradient"] = torch.zeros(batch, shared, count, width)
        strided = dict(zip(_STRIDED, (query, key, landmarks), strict=True))
        others = {name: x.contiguous() for name, x in places.items()}
        kept = call.hand_over(strided, others | made | {"factors": factors.contiguous()})
        calls.load(*KERNEL)(ctypes.byref(call))
        del kept
        ctx.time, ctx.dtypes = query.shape[2], (query.dtype, landmarks.dtype)
        ctx.save_for_backward(
            places["slots"],
            made.get("query_gradient"),
            made.get("landmark_gradient"),
            factor_gradient.sum(dim=0) if of_factors else None,
        )
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("the guided loss on a CPU")
        slots, of_query, of_landmarks, of_factors = ctx.saved_tensors
        if of_query is not None:
            batch, _, heads, width = of_query.shape
            whole = of_query.new_zeros(batch, ctx.time, heads, width, dtype=ctx.dtypes[0])
            whole.index_copy_(1, slots, (of_query * gradient).to(whole.dtype))
            of_query = whole.transpose(1, 2)
        if of_landmarks is not None:
            of_landmarks = (of_landmarks * gradient).to(ctx.dtypes[1])
        if of_factors is not None:
            of_factors = of_factors * gradient
        return of_query, None, of_landmarks, of_factors, None, None, None
