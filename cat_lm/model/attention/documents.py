"""How attention keeps packed documents apart: by a mask, or by borders in rows joined end to end.

A mask is [B, 1, T, T], which every layer reads and keeps for its backward pass. Flash attention for
rows of many lengths takes the borders of the documents instead and computes nothing across them.
torch has it in its own kernel, the one that `torch.nn.attention.varlen` calls (and whose arguments
that changes from version to version).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cat_lm.model import attention
from cat_lm.model.settings import AttentionSettings

HALF = (torch.bfloat16, torch.float16)
WIDEST_HEAD = 256  # of the kernel
_MASKS = {"eager": "a mask", "flex_attention": "a mask of blocks"}


class DocumentAttention(NamedTuple):
    """What keeps documents apart, and why it does.

    name: `varlen`, torch's kernel; `flash`, that of the implementation; `rows`, where sdpa's place
    is taken by `attend_by_rows`; or `mask`.
    """

    name: str
    reason: str


def document_attention(
    config: AttentionSettings, device: torch.device, dtype: torch.dtype
) -> DocumentAttention:
    """Choose by `attn_implementation` and, for sdpa, by what the kernel can do.

    Args:
        device, dtype: where and in what queries, keys and values are.
    """
    implementation = config._attn_implementation
    if "flash" in implementation:
        return DocumentAttention("flash", f"attn_implementation={implementation}")
    if implementation != "sdpa":
        made = _MASKS.get(implementation, "a mask")
        return DocumentAttention("mask", f"attn_implementation={implementation} takes {made}")
    score = attention.score_transform(config)
    if score is not None and score.masks_documents(config):
        return DocumentAttention("rows", f"{score.title}, computed for some queries at a time")
    if obstacle := _why_no_kernel(config, device, dtype):
        return DocumentAttention("mask", obstacle)
    return DocumentAttention("varlen", "torch's flash attention for rows of many lengths")


def _why_no_kernel(
    config: AttentionSettings, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Say why torch's kernel cannot serve; None if it can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"no flash attention for documents on this {device.type}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "flash attention needs a GPU of compute capability 8.0"
    if dtype not in HALF:
        return f"flash attention needs half precision, not {str(dtype).removeprefix('torch.')}"
    width = config.head_width
    if width % 8 or width > WIDEST_HEAD:
        return f"flash attention needs heads of a multiple of 8, up to {WIDEST_HEAD}, not {width}"
    # What goes with the package of that name goes with the kernel.
    problems = attention.implementation_problems(config, "flash_attention_2")
    return problems[0].partition(": ")[2] if problems else None


def computing_dtype(x: Tensor) -> torch.dtype:
    """Tell what linear layers make of x: its dtype, or autocast's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def attend_within_borders(
    query: Tensor, key: Tensor, value: Tensor, borders: Tensor, scaling: float, dropout: float
) -> Tensor:
    """Attend causally within documents by torch's kernel.

    Args:
        query: [B, H, T, D], in half precision on a GPU.
        key, value: [B, H or fewer, T, D].
        borders: [N+1] int32, as `cat_lm.ops.documents.document_borders`.
        scaling: of q·k.
        dropout: the part of the maps to drop.

    Returns:
        [B, T, H, D].
    """
    batch, _, time, _ = query.shape
    dtype = computing_dtype(query)
    # [B, H, T, D] to [B·T, H, D]
    joined = (x.to(dtype).transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    # T bounds the documents' lengths, of which the host knows nothing. No debug mask.
    output, *_ = torch.ops.aten._flash_attention_forward(
        *joined, borders, borders, time, time, dropout, True, False, scale=scaling
    )
    return output.unflatten(0, (batch, time))
