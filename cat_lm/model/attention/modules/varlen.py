"""Attention within packed documents by torch's own kernel, for rows of many lengths.

It is the one that `torch.nn.attention.varlen` calls (and whose arguments that changes from version
to version).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cat_lm.model.rules import WIDEST_FLASH_HEAD

HALF = (torch.bfloat16, torch.float16)


def why_no_kernel(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """Return why torch's kernel cannot serve heads of `width` channels; None if it can.

    A GPU of another machine, for which a run is planned here, is taken to have it.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return f"no flash attention for documents on this {device.type}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return "flash attention needs a GPU of compute capability 8.0"
    if dtype not in HALF:
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
