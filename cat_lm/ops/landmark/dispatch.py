"""The backends of attention to chosen blocks, and which of them computes a call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cat_lm.ops.landmark.blocks import attend_block_major
from cat_lm.ops.landmark.decode import has_kernel
from cat_lm.ops.landmark.gather import attend_gathered
from cat_lm.ops.landmark.layout import BlockLayout
from cat_lm.ops.landmark.reference import attend_by_masks
from cat_lm.ops.landmark.segments import attend_segments, why_not
from cat_lm.ops.runtime.fake import computing_device
from cat_lm.ops.runtime.flops import flops

# Queries whose blocks are copied together; of more, the copies are the greater part of the work.
FEW_QUERIES = 16
# Keys from which on the masks cost more than what they save.
MANY_KEYS = 4096

MEANINGS = {
    "reference": "masks of [B, H, T, S]",
    "cpu": "a C++ kernel, for decoding",
    "gather": "copies of the chosen blocks, for decoding",
    "triton": "a Triton kernel, a block and the queries that chose it at a time",
    "blocks": "a block and the queries that chose it at a time, for long rows",
}

_SPARSE = {
    "gather": attend_gathered,
    "triton": attend_segments,
    "blocks": attend_block_major,
}


def choose_backend(
    implementation: str, queries: int, keys: int, dropout: float, has_triton: bool = False
) -> str:
    """Name the backend of a whole row, one of MEANINGS, for T queries and S keys.

    Args:
        implementation: `attn_implementation`: eager or sdpa.
        has_triton: whether the Triton kernel serves, see `cat_lm.ops.landmark.segments.why_not`.
    """
    if implementation == "eager" or dropout > 0:  # the others drop no weights
        return "reference"
    if queries <= FEW_QUERIES and queries < keys:
        return "gather"
    if has_triton:
        return "triton"
    return "blocks" if keys > MANY_KEYS else "reference"


def choose_decoder(
    implementation: str, queries: int, keys: int, device: torch.device, dtype: torch.dtype
) -> str:
    """Name the backend of T queries that follow a cache; the kernel knows no gradients."""
    name = choose_backend(implementation, queries, keys, 0.0)
    return "cpu" if name == "gather" and has_kernel(device, dtype) else name


def _flops(*given: Any) -> float:
    """Count as softmax attention to the keys of so many blocks."""
    _, query, key, _, selected, layout, local, *_ = given
    read = min((selected.shape[3] + local) * layout.block, key.shape[2])
    return 4.0 * query.numel() * read


@flops(_flops)
def attend_blocks(
    implementation: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    selected: Tensor,
    layout: BlockLayout,
    local: int,
    scaling: float,
    dropout: float,
) -> tuple[Tensor, Tensor | None]:
    """Attend to local keys and chosen blocks, by the backend that `choose_backend` names.

    Args:
        query: [B, H, T, D].
        key, value: [B, H or fewer, S, D].
        selected: places of blocks [B, G, T, m], see `cat_lm.ops.landmark.select`.

    Returns:
        [B, H, T, D], and with eager the maps [B, H, T, S].
    """
    has_triton = why_not(computing_device(query), query.dtype, layout.block, query.shape[3]) is None
    name = choose_backend(implementation, query.shape[2], key.shape[2], dropout, has_triton)
    if name in _SPARSE and _is_stacked(query):
        name = "reference"
    if name in _SPARSE:
        return _SPARSE[name](query, key, value, selected, layout, local, scaling), None
    keeps_maps = implementation == "eager"
    return attend_by_masks(query, key, value, selected, layout, local, scaling, dropout, keeps_maps)


def _is_stacked(x: Tensor) -> bool:
    """Return True if several models compute as one, of whom each has chosen other blocks."""
    return not torch.compiler.is_compiling() and torch._C._functorch.is_batchedtensor(x)
