"""A convolution of a stream by filters as long as the text (`conv_filter: exponential, ssm`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from cat_lm.model.context import Context
from cat_lm.model.streams.base import StreamCall, StreamOp
from cat_lm.ops.long_filter import filters as long_filters
from cat_lm.ops.long_filter.api import continued, long_conv
from cat_lm.ops.long_filter.filters import Modes

if TYPE_CHECKING:
    from cat_lm.model.attention.settings import AttentionSettings


class LongFilter(StreamOp):
    """Convolves a stream over all lags j ≤ t, and adds its projection's bias.

    A filter is O(N) numbers that `cat_lm.ops.long_filter` computes F from: `kind` is what they
    mean, N is `size`.
    """

    name = "filter"
    window, head_axis = 1, 0  # no inputs are kept, and each head has numbers of its own

    def __init__(self, config: AttentionSettings) -> None:
        self.settings, self.size = config, config.conv_state
        self.kind = long_filters.get(config.conv_filter)

    def initial(self, stream: str) -> Tensor:
        """Make the numbers of filters that change nothing."""
        return self.kind.identity(self.settings.stream_heads(stream), self.size)

    def drawn(self, stream: str) -> Tensor:
        """Draw the numbers as they start, by `conv_init`."""
        heads = self.settings.stream_heads(stream)
        return self.kind.start_as(self.settings.conv_init, heads, self.size)

    def used(self, numbers: Tensor) -> Tensor:
        """Return the numbers, which are used as they are."""
        return numbers

    def __call__(self, x: Tensor, call: StreamCall) -> Tensor:
        """Convolve x [B, T, heads, D]."""
        numbers = call.weights.taps(call.stream, call.context.group)
        return self.by(numbers, x, call.bias, call.stream, call.context)

    def by(
        self, numbers: Tensor, x: Tensor, bias: Tensor | None, name: str, context: Context
    ) -> Tensor:
        """Convolve by filters of numbers [heads, P], whose state is `name` in the layer's."""
        return convolve_long(self.kind.modes_of(numbers, self.size), x, bias, name, context)


def convolve_long(
    modes: Modes, x: Tensor, bias: Tensor | None, name: str, context: Context
) -> Tensor:
    """Convolve x [B, T, H, D], zeros at padding, by filters as long as the text.

    A row that ends in padding is continued from the state after its last real token.

    Args:
        modes: the filters, in fp32: half precision has no rates near 0.
        bias: [H, D].
        name: of the filters' state in the layer's, which is updated; no inputs are kept.
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
