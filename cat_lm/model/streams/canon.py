"""Canon layers: short causal convolutions of a block's hidden states, added to them.

Allen-Zhu, "Physics of Language Models: Part 4.1, Architecture Design and the Magic of Canon Layers"
(arXiv:2512.17351). For channel d of x [B, T, C], with zeros before the start and across documents:

    canon(x)[b, t, d] = x[b, t, d] + sum over j < W of F[d, j] · x[b, t − j, d]

| place | of what                                                   | channels     |
|-------|-----------------------------------------------------------|--------------|
| A     | what attention reads, after its norm                      | C            |
| C     | what the MLP reads, after its norm                        | C            |
| D     | what its activation reads; of a gated MLP gate and values | I, gated 2 I |

The place B, queries, keys and values before the rotation, is `conv_type: depthwise`: the same
functions, which with `conv_init: residual` start alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cat_lm.model.context import Context
from cat_lm.model.rules import canon_places
from cat_lm.ops import convolve

if TYPE_CHECKING:
    from cat_lm.model.attention.settings import AttentionSettings


class CanonLayer(nn.Module):
    """Adds to each of `width` channels its convolution by `canon_filter` [1, width, W].

    Lag 0 is first. The filters take no weight decay, as those of a `StreamPipeline`.
    """

    no_decay = ("canon_filter",)

    def __init__(self, place: str, width: int, window: int):
        super().__init__()
        self.state_name = f"canon_{place}"
        self.window = window
        self.canon_filter = nn.Parameter(torch.zeros(1, width, window))

    def forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        """Convolve [B, T, width] and add it; padding is read as zeros."""
        if context.group is None:
            return self._whole(hidden_states, context)
        before = self.window - 1
        (read,) = context.group.with_halo(before, hidden_states)
        return self._whole(read, context.part(before))[:, before:]

    def _whole(self, hidden_states: Tensor, context: Context) -> Tensor:
        """Compute `forward` with all that the filters read."""
        hidden_states = context.without_padding(hidden_states)
        inputs = hidden_states[:, :, None]  # one head of all channels
        before = None
        if context.state is not None and self.window > 1:
            before = context.state.exchange_inputs(
                self.state_name, inputs, self.window, context.padding
            )
        convolved = convolve(
            "depthwise",
            inputs,
            self.canon_filter,
            document_ids=context.documents,
            positions=context.document_positions,
            initial_state=before,
            backend=context.conv_backend,
        )
        return hidden_states + convolved[:, :, 0]


class CanonBlock:
    """Places Canon layers in a family's block.

    The module's name is `canon`, of which A, C and D are those that the configuration names;
    without any there is no such module.
    """

    def _add_canon(self, config: AttentionSettings, inner: int) -> None:
        """Make the layers; `inner` is the number of channels that the activation reads."""
        widths = {"A": config.hidden_size, "C": config.hidden_size, "D": inner}
        self.canon = None
        if places := canon_places(config):
            self.canon = nn.ModuleDict(
                {place: CanonLayer(place, widths[place], config.canon_window) for place in places}
            )

    def _with_canon(self, place: str, hidden_states: Tensor, context: Context) -> Tensor:
        """Pass the place's layer, if there is one."""
        if self.canon is None or place not in self.canon:
            return hidden_states
        return self.canon[place](hidden_states, context)
