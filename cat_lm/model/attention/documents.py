"""How attention keeps packed documents apart: by a mask, or by borders in rows joined end to end.

A mask is [B, 1, T, T], which every layer reads and keeps for its backward pass. Flash attention for
rows of many lengths takes the borders of the documents instead and computes nothing across them.
torch has it in its own kernel, the one that `torch.nn.attention.varlen` calls (and whose arguments
that changes from version to version).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cat_lm.model import attention
from cat_lm.model.attention.modules.call import why_no_kernel
from cat_lm.model.rules import query_width

if TYPE_CHECKING:
    import torch

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
