"""The fused query, key and value projection with causal convolutions along time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.model.cache import ConvStateMixin
from cat_lm.model.configuration import STREAMS, CatConfig
from cat_lm.ops import head_conv, multihead_conv

# Each choice of streams as a slice of the dimension (q, k, v), so that choosing copies nothing.
_STREAM_SLICES = {
    "q": slice(0, 1),
    "k": slice(1, 2),
    "v": slice(2, 3),
    "qk": slice(0, 2),
    "kv": slice(1, 3),
    "qv": slice(0, 3, 2),
    "qkv": slice(0, 3),
}


def identity_filters(config: CatConfig) -> Tensor:
    """A stream's filters that change nothing: [H, W], or [W, H, H] for `multihead`."""
    heads, window = config.num_attention_heads, config.conv_window
    if config.conv_type == "multihead":
        filters = torch.zeros(window, heads, heads)
        filters[0] = torch.eye(heads)
    else:
        filters = torch.zeros(heads, window)
        filters[:, 0] = 1.0
    return filters


class ConvolvedProjection(nn.Linear):
    """GPT-NeoX's `query_key_value` with convolutions of the chosen streams.

    For stream s in {q, k, v}, head h and lags j = 0 … W−1 (zeros before the start), with one filter
    for each head (`conv_type: head`):

        y_s[b,t,h,:] = bias_{s,h} + sum_j F_s[h,j] x_s[b,t−j,h,:],   x_s = hidden · Wᵀ_{s,h}

    which is (F_s * X) W_s + b of the paper's definition: a filter that the channels of a head share
    commutes with the projection, and the bias is added after the convolution. With one filter for
    each pair of heads (`conv_type: multihead`), which has to follow the projection, as before it
    all heads read the same X:

        y_s[b,t,i,:] = bias_{s,i} + sum_h sum_j F_s[j,i,h] x_s[b,t−j,h,:]

    The filters `q_filter`, `k_filter`, `v_filter`, lag 0 first, are parameters of this module,
    beside `weight` and `bias`, so that whoever gathers a module's parameters before its forward
    (ZeRO-3, FSDP) gathers all that the forward reads.
    """

    def __init__(self, config: CatConfig):
        super().__init__(config.hidden_size, 3 * config.hidden_size, bias=config.attention_bias)
        self.num_heads = config.num_attention_heads
        self.window = config.conv_window
        self.streams = config.convolved_streams
        self.mixes_heads = config.conv_type == "multihead"
        for stream in self.streams:
            self.register_parameter(f"{stream}_filter", nn.Parameter(identity_filters(config)))

    def filters(self) -> list[nn.Parameter]:
        """The filters of the convolved streams, in the order q, k, v."""
        return [getattr(self, f"{stream}_filter") for stream in self.streams]

    def forward(
        self,
        hidden_states: Tensor,
        padding_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        state: ConvStateMixin | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Projects and convolves.

        Args:
            hidden_states: [B, T, C].
            padding_mask: [B, T] bool, False at padding, which the convolution reads as zeros.
            document_ids: [B, T]; the convolution reads zeros across a change of the id.
            state: the layer's cache; its last W−1 inputs stand before these, and it is updated.

        Returns:
            Queries, keys and values, each [B, T, H, D].
        """
        batch, time, _ = hidden_states.shape
        projected = F.linear(hidden_states, self.weight).view(batch, time, self.num_heads, 3, -1)
        if padding_mask is not None:
            projected = projected.masked_fill(~padding_mask[:, :, None, None, None], 0.0)
        bias = None if self.bias is None else self.bias.view(self.num_heads, 3, -1)

        chosen = _STREAM_SLICES[self.streams]
        convolved = self._convolve(
            projected[:, :, :, chosen],
            None if bias is None else bias[:, chosen],
            padding_mask,
            document_ids,
            state,
        )
        outputs = dict(zip(self.streams, convolved, strict=True))
        for index, stream in enumerate(STREAMS):
            if stream not in outputs:
                unchanged = projected[:, :, :, index]
                outputs[stream] = unchanged if bias is None else unchanged + bias[:, index]
        return outputs["q"], outputs["k"], outputs["v"]

    def _convolve(
        self,
        inputs: Tensor,
        bias: Tensor | None,
        padding_mask: Tensor | None,
        document_ids: Tensor | None,
        state: ConvStateMixin | None,
    ) -> Sequence[Tensor]:
        """The chosen streams, inputs [B, T, H, S, D] and bias [H, S, D], as S x [B, T, H, D]."""
        initial_state = None
        if state is not None and self.window > 1:
            initial_state = state.exchange_conv_inputs(inputs, self.window, padding_mask)
        if self.mixes_heads:
            return [
                multihead_conv(
                    inputs[:, :, :, index],
                    filters,
                    None if bias is None else bias[:, index],
                    document_ids=document_ids,
                    initial_state=None if initial_state is None else initial_state[:, :, :, index],
                )
                for index, filters in enumerate(self.filters())
            ]
        # One call for all streams: [B, T, H, S, D] is [B, T, H·S, D] with H·S filters.
        outputs = head_conv(
            inputs.flatten(2, 3),
            torch.stack(self.filters(), dim=1).flatten(0, 1),
            None if bias is None else bias.flatten(0, 1),
            document_ids=document_ids,
            initial_state=None if initial_state is None else initial_state.flatten(2, 3),
        )
        return outputs.unflatten(2, inputs.shape[2:4]).unbind(dim=3)
