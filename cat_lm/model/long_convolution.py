"""Long filters (`conv_filter`) in a model: what they make of a stream, and their state."""

from __future__ import annotations

from torch import Tensor

from cat_lm.model.cache import LayerStateMixin
from cat_lm.ops.long_filter.api import continued, long_conv
from cat_lm.ops.long_filter.filters import LongFilter


def convolve_long(
    kind: LongFilter,
    size: int,
    numbers: Tensor,
    x: Tensor,
    bias: Tensor | None,
    *,
    name: str,
    padding_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    positions: Tensor | None = None,
    state: LayerStateMixin | None = None,
    backend: str = "auto",
) -> Tensor:
    """Convolve x [B, T, H, D], zeros at padding, by filters of `numbers` [H, P].

    Args:
        size: N, the numbers of state of a head and channel.
        bias: [H, D].
        name: of the state in the layer's cache, which is updated; no inputs are kept.
        padding_mask: [B, T] bool, False at padding; a row that ends in it goes on from the state
            after its last real token.
        document_ids, positions, backend: as of `long_conv`.
        state: the layer's cache.

    Returns:
        [B, T, H, D].
    """
    # In fp32 from here on: half precision has no rates near 0.
    modes = kind.modes_of(numbers, size)
    if state is None:
        return long_conv(
            x, modes, bias, document_ids=document_ids, positions=positions, backend=backend
        )
    before = state.recurrent.get(name)
    outputs, after = continued(x, modes, bias, before, padding_mask, backend)
    state.replace_recurrent(name, after)
    return outputs
