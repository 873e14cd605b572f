"""No mixing of positions."""

from __future__ import annotations

from torch import Tensor, nn

from cat_lm.mixers.modules.context import State


class NoMixing(nn.Linear):
    """y = W x + b; positions, documents and padding are nothing to it."""

    def forward(
        self,
        x: Tensor,
        *,
        document_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        state: State | None = None,
    ) -> Tensor:
        return super().forward(x)
