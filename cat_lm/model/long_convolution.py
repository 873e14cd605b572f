"""Filters as long as the text, in a model: what they make of a stream, and their state."""

from __future__ import annotations

from torch import Tensor

from cat_lm.model.context import Context
from cat_lm.ops.long_filter.api import continued, long_conv
from cat_lm.ops.long_filter.filters import Modes


def convolve_long(
    modes: Modes,
    x: Tensor,
    bias: Tensor | None,
    name: str,
    context: Context,
) -> Tensor:
    """Convolve x [B, T, H, D], zeros at padding, by filters as long as the text.

    A row that ends in padding is continued from the state after its last real token.

    Args:
        modes: the filters, in fp32: half precision has no rates near 0.
        bias: [H, D].
        name: of the filters' state in the layer's, which is updated; no inputs are kept.

    Returns:
        [B, T, H, D].
    """
    state, backend = context.state, context.conv_backend
    if state is None:
        documents, positions = context.documents, context.document_positions
        return long_conv(
            x, modes, bias, document_ids=documents, positions=positions, backend=backend
        )
    before = state.recurrent.get(name)
    outputs, after = continued(x, modes, bias, before, context.padding, backend)
    state.replace_recurrent(name, after)
    return outputs
