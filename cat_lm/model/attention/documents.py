"""How attention keeps packed documents apart: by a mask, or by borders in rows joined end to end.

A mask is [B, 1, T, T], which every layer reads and keeps for its backward pass. Flash attention for
rows of many lengths takes the borders of the documents instead and computes nothing across them.
torch has it in its own kernel, the one that `torch.nn.attention.varlen` calls (and whose arguments
that changes from version to version).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from cat_lm.model import attention
from cat_lm.model.rules import WIDEST_FLASH_HEAD, query_width

if TYPE_CHECKING:
    from cat_lm.model.attention.settings import AttentionSettings

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
    if obstacle := why_no_kernel(device, dtype, query_width(config)):
        return DocumentAttention("mask", obstacle)
    # What goes with the package of that name goes with the kernel.
    if problems := attention.implementation_problems(config, "flash_attention_2"):
        return DocumentAttention("mask", problems[0].partition(": ")[2])
    return DocumentAttention("varlen", "torch's flash attention for rows of many lengths")


def why_no_kernel(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """Return why torch's kernel cannot serve heads of `width` channels; None if it can.

    A GPU of another machine, for which a run is planned here, is taken to have it.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return f"no flash attention for documents on this {device.type}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return "flash attention needs a GPU of compute capability 8.0"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash attention needs half precision, not {str(dtype).removeprefix('torch.')}"
    if width % 8 or width > WIDEST_FLASH_HEAD:
        most = WIDEST_FLASH_HEAD
        return f"flash attention needs heads of a multiple of 8, up to {most}, not {width}"
    return None


def computing_dtype(x: Tensor) -> torch.dtype:
    """Return what linear layers make of x: its dtype, or autocast's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def attend_within_borders(
    query: Tensor, key: Tensor, value: Tensor, borders: Tensor, scaling: float, dropout: float
) -> Tensor:
    """Attend causally within documents by torch's kernel.

    Args:
        query: [B, H, T, D], in half precision on a GPU.
        key, value: [B, H or fewer, T, D].
        borders: [N+1] int32, as `cat_lm.ops.runtime.documents.document_borders`.
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
