"""The module of `value_transform: smoothing`: a box filter of the values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cat_lm.model.context import Context
from cat_lm.ops import head_conv
from cat_lm.ops.convolution.api import centred_conv


class SmoothedValues(nn.Module):
    """Averages each value with those of the P − 1 tokens before it, in one convolution.

    An encoder may have the box in the middle, over (P − 1)/2 values on either side.

    Args:
        width: P.
        run: the tokens of a chunk, beyond which no query sees and nothing is averaged; None for
            attention to all keys.
        is_centred: whether later values are read too: of whole rows, with P odd.
    """

    def __init__(self, width: int, run: int | None, is_centred: bool = False):
        super().__init__()
        if is_centred and run is not None:
            raise ValueError(f"run={run}: a centred box reads whole rows; cut them before")
        self.width, self.run, self.is_centred = width, run, is_centred

    def forward(self, value: Tensor, context: Context) -> Tensor:
        """Average values [B, T, H, D]; with chunks the context has the tokens' positions."""
        value, documents = context.without_padding(value), context.documents
        taps = value.new_full((value.shape[2], self.width), 1 / self.width)
        how = {"backend": context.conv_backend}
        if self.is_centred:
            if documents is not None or context.state is not None:
                raise ValueError("a centred box reads later values: not with documents or a state")
            return centred_conv(value, taps, **how)
        before = context.inputs_before("value", value, self.width)
        if self.run is not None:
            documents = self._runs(value, context.positions, documents)
        if self.run is None or before is None:
            return head_conv(value, taps, document_ids=documents, initial_state=before, **how)
        # Of the values before, those that the first new token's chunk holds.
        past = before.shape[1]
        ages = torch.arange(past, 0, -1, device=value.device)
        is_same = ages <= context.positions[:, :1] % self.run
        runs = torch.cat([(is_same.int() - 1).expand(len(value), -1), documents], dim=1)
        whole = torch.cat([before, value], dim=1)
        return head_conv(whole, taps, document_ids=runs, **how)[:, past:]

    def _runs(self, value: Tensor, positions: Tensor, document_ids: Tensor | None) -> Tensor:
        """Number the chunks of new tokens, [B, T], from 0."""
        starts = (positions % self.run == 0).expand(*value.shape[:2]).clone()
        if document_ids is not None:
            starts[:, 1:] |= document_ids.diff(dim=1) != 0
        starts[:, 0] = False
        return starts.int().cumsum(dim=1).int()
