"""flash-linear-attention's chunked operators on a GPU, for `train.mixer_backend: fla`.

They are for language models in bf16: products in bf16, on matrix units, and sums in fp32. In fp32
they do not serve: the delta rule's refuses it, the others' products would be in TF32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.ops.runtime.documents import document_starts
from cat_lm.ops.runtime.operators import refuse_second_derivative


def chunked_gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, **how: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute what a decaying scan does as gated linear attention, o [B, T, H, V].

    All functions here take document_ids, initial_state and return_state as `decaying_scan` and
    `delta_rule` of this folder do.
    """
    from fla.ops.gla import chunk_gla

    return _run(chunk_gla, {"q": q, "k": k, "v": v, "g": log_decay}, **how)


def chunked_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None = None, **how: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute what `cat_lm.ops.recurrence.delta_rule` does, of q, k, v in bf16, products too."""
    streams = {"q": q, "k": k, "v": v, "beta": beta}
    if log_decay is None:
        from fla.ops.delta_rule import chunk_delta_rule

        return _run(chunk_delta_rule, streams, **how)
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return _run(chunk_gated_delta_rule, streams | {"g": log_decay}, **how)


def _run(
    operator: Callable[..., tuple[Tensor, Tensor]],
    streams: dict[str, Tensor],
    *,
    document_ids: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Call an operator, which takes documents as boundaries of one long row."""
    how = {"initial_state": initial_state, "output_final_state": return_state}
    if document_ids is None:
        y, state = _differentiable_once(*operator(**streams, **how))
        return (y, state) if return_state else y
    shape = document_ids.shape
    starts = document_starts(document_ids)
    (borders,) = starts.flatten().nonzero(as_tuple=True)
    # The number of the document that begins each row.
    first = starts.sum(dim=1).cumsum(dim=0) - starts.sum(dim=1)
    if initial_state is not None:
        states = initial_state.new_zeros(len(borders), *initial_state.shape[1:])
        how["initial_state"] = states.index_copy(0, first, initial_state)
    joined = {name: s.flatten(0, 1)[None] for name, s in streams.items()}
    cu_seqlens = F.pad(borders, (0, 1), value=starts.numel())
    y, state = _differentiable_once(*operator(**joined, **how, cu_seqlens=cu_seqlens))
    y = y.unflatten(1, shape).squeeze(0)
    return (y, state[first + starts.sum(dim=1) - 1]) if return_state else y


def _differentiable_once(y: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return an operator's outputs such that differentiating its backward pass raises."""
    for x in (y, state):
        # torch.compile refuses second derivatives itself, and takes no hooks.
        if x is not None and x.requires_grad and not torch.compiler.is_compiling():
            x.register_hook(
                lambda _: refuse_second_derivative("mixer_backend=fla", "use mixer_backend=torch")
            )
    return y, state
