"""Causal convolutions along time between the query, key and value projection and attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.model.cache import ConvStateMixin
from cat_lm.model.configuration import STREAMS, CatConfig
from cat_lm.model.map_mixing import mixed_values
from cat_lm.ops import (
    BACKENDS,
    choose_backend,
    convolve,
    head_conv_qkv,
    rotate,
)
from cat_lm.ops.convolution import kinds
from cat_lm.ops.convolution.qkv import STREAM_SLICES


def identity_filters(config: CatConfig) -> Tensor:
    """Make a stream's filters that change nothing, of the shape of their kind."""
    heads = config.num_attention_heads
    kind = kinds.get(config.conv_type)
    return kind.identity(heads, config.hidden_size // heads, config.conv_window)


def describe_backend(
    config: CatConfig, device: torch.device | str, dtype: torch.dtype, backend: str = "auto"
) -> str:
    """What will compute the convolutions of a model, and why, in one line for a log.

    Args:
        config: the model's.
        device, dtype: where and in what the projections are computed.
        backend: what `CatForCausalLM.set_conv_backend` was given.

    Raises:
        ValueError: the backend asked for cannot serve.
    """
    if not config.convolved_streams:
        return "no convolutions"
    heads = config.num_attention_heads
    # Values whose attention maps are mixed are convolved head by head.
    parts = [(config.conv_type, config.embedding_streams, "")]
    if config.mixes_maps:
        parts.append(("head", "v", " for the mixing of attention maps"))
    lines = []
    for conv_type, streams, purpose in parts:
        if not streams:
            continue
        choice = choose_backend(
            conv_type,
            device=device,
            dtype=dtype,
            window=config.conv_window,
            heads=heads,
            head_dim=config.hidden_size // heads,
            backend=backend,
        )
        what = BACKENDS[choice.name].describe(conv_type, dtype, config.conv_window)
        lines.append(
            f"{conv_type} convolution of {', '.join(streams)}{purpose} (W={config.conv_window}): "
            f"{choice.name}, {choice.reason}; {what}"
        )
    return "; ".join(lines)


class AttentionConvolution(nn.Module):
    """Convolve the chosen streams of projected queries, keys and values, add the bias, rotate.

    For stream s in {q, k, v}, head h and lags j = 0 … W−1 (zeros before the start), with one filter
    for each head (`conv_type: head`):

        y_s[b,t,h,:] = bias_{s,h} + sum_j F_s[h,j] x_s[b,t−j,h,:],   x_s = hidden · Wᵀ_{s,h}

    which is (F_s * X) W_s + b of the paper's definition: a filter that the channels of a head share
    commutes with the projection, and the bias is added after the convolution. With one filter for
    each pair of heads (`conv_type: multihead`), which has to follow the projection, as before it
    all heads read the same X:

        y_s[b,t,i,:] = bias_{s,i} + sum_h sum_j F_s[j,i,h] x_s[b,t−j,h,:]

    (`conv_mixing: maps` uses the values' filters otherwise: see `cat_lm.model.map_mixing`.) With
    one filter for each channel (`conv_type: depthwise`), and with `conv_activation: silu` its SiLU:

        y_s[b,t,h,d] = bias_{s,h,d} + sum_j F_s[h,d,j] x_s[b,t−j,h,d]

    Queries and keys are then rotated. `query_key_value` stays a plain linear layer, so that what
    replaces or adapts linear layers (LoRA, quantisation) means the same as in any other model.
    This module holds the filters `q_filter`, `k_filter`, `v_filter`, lag 0 first, and the
    projection's `bias` [3 C], and its forward reads no other parameters: whoever gathers a module's
    parameters before its forward (ZeRO-3, FSDP) gathers all that it needs.
    """

    no_decay = ("bias", *(f"{stream}_filter" for stream in STREAMS))

    def __init__(self, config: CatConfig, bias: nn.Parameter | None):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.conv_type = config.conv_type
        self.window = config.conv_window
        self.streams = config.convolved_streams
        self.embedding_streams = config.embedding_streams
        self.activation = config.conv_activation
        self.mixes_maps = config.mixes_maps
        self.conv_backend = "auto"
        self.register_parameter("bias", bias)
        for stream in self.streams:
            self.register_parameter(f"{stream}_filter", nn.Parameter(identity_filters(config)))

    def filters(self) -> list[nn.Parameter]:
        """The filters of the streams that have them, in the order q, k, v."""
        return [getattr(self, f"{stream}_filter") for stream in self.streams]

    def forward(
        self,
        projected: Tensor,
        rotary: tuple[Tensor, Tensor] | None = None,
        padding_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        state: ConvStateMixin | None = None,
        follows_cache: bool = False,
    ) -> tuple[Tensor, ...]:
        """Convolve and rotate.

        Args:
            projected: what the projection makes without a bias, [B, T, H·3·D]: for each head its
                queries, keys and values, as GPT-NeoX packs them.
            rotary: cosines and sines, [B or 1, T, rotated channels]; None for no rotation.
            padding_mask: [B, T] bool, False at padding, which the convolution reads as zeros.
            document_ids: [B, T]; the convolution reads zeros across a change of the id.
            state: the layer's cache; its last W−1 inputs stand before these, and it is updated.
            follows_cache: for the mixing of maps, whether attention also reads cached values.

        Returns:
            Queries, keys and values, each [B, T, H, D]. If maps are mixed, values are zero at
            padding, and a fourth tensor follows: `mixed_values` of them [B, T, H, H D], or, after
            a cache, the values' filters [W, H, H], with which `attend_mixing_maps` goes on.
        """
        projected = projected.view(*projected.shape[:2], self.num_heads, 3, -1)
        if padding_mask is not None:
            projected = projected.masked_fill(~padding_mask[:, :, None, None, None], 0.0)
        bias = None if self.bias is None else self.bias.view(self.num_heads, 3, -1)
        initial_state = self._exchange_state(projected, padding_mask, state)

        if self.conv_type == kinds.HEAD.name:  # one kernel for all three streams
            return head_conv_qkv(
                projected,
                [getattr(self, f"{stream}_filter", None) for stream in STREAMS],
                bias,
                rotary=rotary,
                document_ids=document_ids,
                initial_state=initial_state,
                backend=self.conv_backend,
            )
        query, key, value = (
            self._stream(stream, projected, bias, document_ids, initial_state) for stream in STREAMS
        )
        if rotary is not None:
            query, key = rotate(query, *rotary), rotate(key, *rotary)
        if not self.mixes_maps:
            return query, key, value
        if padding_mask is not None:
            value = value.masked_fill(~padding_mask[:, :, None, None], 0.0)
        if follows_cache:
            # A copy, because an engine may take the parameter away after this forward.
            return query, key, value, self.v_filter.clone()
        mixed = mixed_values(value, self.v_filter, document_ids, self.conv_backend)
        return query, key, value, mixed

    def _exchange_state(
        self, projected: Tensor, padding_mask: Tensor | None, state: ConvStateMixin | None
    ) -> Tensor | None:
        """The W−1 inputs before these, [B, W−1, H, S, D], of the S streams convolved here."""
        if state is None or self.window == 1 or not self.embedding_streams:
            return None
        inputs = projected[:, :, :, STREAM_SLICES[self.embedding_streams]]
        return state.exchange_conv_inputs(inputs, self.window, padding_mask)

    def _stream(
        self,
        stream: str,
        projected: Tensor,
        bias: Tensor | None,
        document_ids: Tensor | None,
        initial_state: Tensor | None,
    ) -> Tensor:
        """One stream, convolved by itself, before rotation, [B, T, H, D]."""
        index = STREAMS.index(stream)
        inputs = projected[:, :, :, index]
        bias = None if bias is None else bias[:, index]
        if stream not in self.embedding_streams:
            return inputs if bias is None else inputs + bias.to(inputs.dtype)
        if initial_state is not None:
            initial_state = initial_state[:, :, :, self.embedding_streams.index(stream)]
        outputs = convolve(
            self.conv_type,
            inputs,
            getattr(self, f"{stream}_filter"),
            bias,
            document_ids=document_ids,
            initial_state=initial_state,
            backend=self.conv_backend,
        )
        return F.silu(outputs) if self.activation == "silu" else outputs
