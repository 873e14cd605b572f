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

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from cat_lm.model.cache import LayerStateMixin
from cat_lm.model.rules import canon_places
from cat_lm.model.sequence import SequenceGroup
from cat_lm.ops import convolve

if TYPE_CHECKING:
    from cat_lm.model.hf.settings import AttentionSettings


class Reading(NamedTuple):
    """How a layer's tokens are read.

    padding_mask: [B, T] bool, False at padding. document_ids: [B, T], and document_positions, each
    token's in its document, if known. state: the layer's cache. All of whole sequences.
    """

    padding_mask: Tensor | None
    document_ids: Tensor | None
    document_positions: Tensor | None
    state: LayerStateMixin | None


class CanonLayer(nn.Module):
    """Adds to each of `width` channels its convolution by `canon_filter` [1, width, W].

    Lag 0 is first. The filters take no weight decay, as those of `cat_lm.model.convolution`.
    """

    no_decay = ("canon_filter",)
    sequence_group: SequenceGroup | None = None

    def __init__(self, place: str, width: int, window: int):
        super().__init__()
        self.state_name = f"canon_{place}"
        self.window = window
        self.canon_filter = nn.Parameter(torch.zeros(1, width, window))
        self.conv_backend = "auto"

    def forward(self, hidden_states: Tensor, reading: Reading) -> Tensor:
        """Convolve [B, T, width] and add it; padding is read as zeros."""
        group, before = self.sequence_group, self.window - 1
        if group is None:
            return self._whole(hidden_states, reading)
        (read,) = group.with_halo(before, hidden_states)
        documents = group.part(reading.document_ids, before)
        return self._whole(read, Reading(None, documents, None, None))[:, before:]

    def _whole(self, hidden_states: Tensor, reading: Reading) -> Tensor:
        """Compute `forward` with all that the filters read."""
        padding_mask, document_ids, positions, state = reading
        if padding_mask is not None:
            hidden_states = hidden_states.masked_fill(~padding_mask[:, :, None], 0.0)
        inputs = hidden_states[:, :, None]  # one head of all channels
        before = None
        if state is not None and self.window > 1:
            before = state.exchange_inputs(self.state_name, inputs, self.window, padding_mask)
        convolved = convolve(
            "depthwise",
            inputs,
            self.canon_filter,
            document_ids=document_ids,
            positions=positions,
            initial_state=before,
            backend=self.conv_backend,
        )
        return hidden_states + convolved[:, :, 0]


class CanonBlock:
    """Places Canon layers in a family's block of transformers; before it.

    The module's name is `canon`, of which A, C and D are those that the configuration names;
    without any there is no such module, and the block is transformers' own.
    """

    def _add_canon(self, config: AttentionSettings, inner: int) -> None:
        """Make the layers; `inner` is the number of channels that the activation reads."""
        widths = {"A": config.hidden_size, "C": config.hidden_size, "D": inner}
        self.canon = None
        if places := canon_places(config):
            self.canon = nn.ModuleDict(
                {place: CanonLayer(place, widths[place], config.canon_window) for place in places}
            )

    def _with_canon(self, place: str, hidden_states: Tensor, reading: Reading) -> Tensor:
        """Pass the place's layer, if there is one."""
        if place not in self.canon:
            return hidden_states
        return self.canon[place](hidden_states, reading)
