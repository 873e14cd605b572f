"""The arguments of a pattern's module, visible keys, softmax, and variable-length attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.model.context import Context
from cat_lm.model.rules import WIDEST_FLASH_HEAD


@dataclass
class AttentionCall(Context):
    """The context of a layer with the further arguments of its attention.

    `mask` is what `Pattern.mask` made. `key_positions` are those of all keys, [B or 1, S]; None
    unless a pattern or a transform reads positions.

    Attributes:
        attend: the configuration's attention function with its transform of scores: takes query
            [B, H, T, D], key and value [B, H or fewer, S, D], returns [B, T, H, values' width] and
            maps or None. A pattern that cuts rows also gives the mask, as the function takes it
            (None for a causal one), and the positions of queries and keys, all three or none.
        scaling: the scaling of q·k, 1 / (t sqrt(D)).
        dropout: the part of the maps to drop, 0 outside training.
    """

    attend: Callable[..., tuple[Tensor, Tensor | None]] | None = None
    scaling: float = 1.0
    dropout: float = 0.0

    @property
    def query_positions(self) -> Tensor:
        """Return the positions of the queries, [B or 1, T]."""
        return self.positions


class SoftmaxCore(nn.Module):
    """Softmax attention, as the configuration's function computes it.

    As every pattern's, its forward attends with query [B, H, T, D] and key and value
    [B, H or fewer, S, D], and returns [B, T, H, D] and maybe the maps [B, H, T, S].
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, extra: Tensor | None, call: AttentionCall
    ) -> tuple[Tensor, Tensor | None]:
        return call.attend(query, key, value)


def visible_keys(attention_mask: Any, query: Tensor, key: Tensor) -> Tensor | None:
    """Return which keys each query may see, [B, 1, T, S] bool; None if all of them.

    Args:
        attention_mask: as for transformers' `eager`, `sdpa` or `flex_attention`.
        query, key: [B, H, T, D] and [B, H, S, D].
    """
    batch, _, time, _ = query.shape
    keys = key.shape[2]
    if attention_mask is None:
        # transformers passes no mask for one query, and for queries that start with the keys.
        if time == 1:
            return None
        visible = torch.ones(time, keys, dtype=torch.bool, device=query.device).tril()
    elif not isinstance(attention_mask, Tensor):
        from torch.nn.attention.flex_attention import create_mask

        visible = create_mask(
            attention_mask.mask_mod, batch, None, time, keys, device=str(query.device)
        )
    elif attention_mask.dtype == torch.bool:
        visible = attention_mask
    else:
        visible = attention_mask >= 0  # `eager` adds its mask to the scores.
    return visible.expand(batch, 1, time, keys)


def only_visible(scores: Tensor, visible: Tensor | None) -> Tensor:
    """Return scores [B, H, T, S] with the lowest finite value where `visible` [B, 1, T, S] is
    False.
    """
    if visible is None:
        return scores
    # -inf would make NaN of a padding query that sees no key.
    return scores.masked_fill(~visible, torch.finfo(scores.dtype).min)


def softmax(scores: Tensor, visible: Tensor | None, dropout: float, dtype: torch.dtype) -> Tensor:
    """Return the attention maps of scores [B, H, T, S], computed in fp32 or fp64."""
    computed = torch.promote_types(scores.dtype, torch.float32)
    maps = only_visible(scores, visible).softmax(dim=-1, dtype=computed).to(dtype)
    return F.dropout(maps, dropout, training=dropout > 0)


def why_no_kernel(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """Return why torch's flash attention cannot serve heads of `width` channels; None if it can.

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
    """Return the dtype that linear layers output: x's own, or autocast's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def attend_within_borders(
    query: Tensor, key: Tensor, value: Tensor, borders: Tensor, scaling: float, dropout: float
) -> Tensor:
    """Attend causally within documents by torch's variable-length kernel.

    Args:
        query: [B, H, T, D], in half precision on a GPU.
        key, value: [B, H or fewer, T, D].
        borders: [N+1] int32, as `cat_lm.ops.runtime.documents.document_borders`.

    Returns:
        [B, T, H, D].
    """
    batch, _, time, _ = query.shape
    dtype = computing_dtype(query)
    # [B, H, T, D] to [B·T, H, D]
    joined = (x.to(dtype).transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    # T bounds the documents' lengths, which the host does not know. The last argument turns off
    # debug masks.
    output, *_ = torch.ops.aten._flash_attention_forward(
        *joined, borders, borders, time, time, dropout, True, False, scale=scaling
    )
    return output.unflatten(0, (batch, time))
