"""Decoding state: keys and values as in transformers, and the last W−1 convolution inputs."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticLayer

from cat_lm.model.configuration import CatConfig


class ConvStateMixin:
    """Adds the inputs of a layer's convolutions to a cache layer of transformers.

    `conv_inputs` is [B, n, H, S, D]: the newest n inputs (the projection without its bias) of the S
    convolved streams, n <= W−1; None before the first token. Beams, batch selection, reset and
    offloading move it together with keys and values.

    Cropping needs inputs older than the last W−1. They are kept after `activate_past_recording()`,
    as for transformers' own convolution caches (assisted decoding calls it); a crop that would need
    inputs that are gone raises `RuntimeError`.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.conv_inputs: Tensor | None = None
        self.conv_window: int | None = None
        self.record_past = False

    def exchange_conv_inputs(
        self, inputs: Tensor, window: int, padding_mask: Tensor | None = None
    ) -> Tensor:
        """Stores `inputs` [B, T, H, S, D] and returns the W−1 inputs before them.

        The result is [B, W−1, H, S, D], with zeros before the start of the sequence. Where a row
        ends in padding (`padding_mask` [B, T] bool), its newest inputs are those of its last real
        tokens, so that a right-padded prompt continues like one without padding.
        """
        past = inputs[:, :0] if self.conv_inputs is None else self.conv_inputs
        missing = window - 1 - past.shape[1]
        before = past[:, max(0, -missing) :]
        if missing > 0:
            zeros = inputs.new_zeros(inputs.shape[0], missing, *inputs.shape[2:])
            before = torch.cat([zeros, before], dim=1)

        history = torch.cat([past, inputs.detach()], dim=1)
        if padding_mask is not None:
            history = self._skip_trailing_padding(history, padding_mask)
        if not self.record_past:
            history = history[:, -(window - 1) :].clone()  # a slice would keep the prompt's memory
        self.conv_inputs, self.conv_window = history, window
        return before

    def _skip_trailing_padding(self, history: Tensor, padding_mask: Tensor) -> Tensor:
        trailing = (padding_mask.flip(1).cumsum(1) == 0).sum(1)  # [B]
        if not trailing.any():
            return history
        if self.record_past:
            raise RuntimeError("a cache that records its past cannot take right-padded input")
        source = torch.arange(history.shape[1], device=history.device) - trailing[:, None]
        rows = torch.arange(history.shape[0], device=history.device)[:, None]
        moved = history[rows, source.clamp(min=0)]
        return moved.masked_fill((source < 0)[:, :, None, None, None], 0.0)

    def activate_past_recording(self) -> None:
        """Keeps all inputs from now on until the next crop."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the newest `-tokens_to_remove` tokens."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give the tokens to remove as a negative")
        removed = -tokens_to_remove
        if self.conv_inputs is not None:
            left = self.conv_inputs.shape[1] - removed
            tokens_left = max(0, self.get_seq_length() - removed)
            if left < min(self.conv_window - 1, tokens_left):
                raise RuntimeError(
                    f"cannot remove {removed} tokens: the convolution inputs before them are gone; "
                    "call activate_past_recording() before feeding tokens that may be removed"
                )
            kept = self.conv_inputs[:, : max(0, left)]
            self.conv_inputs = kept[:, max(0, kept.shape[1] - self.conv_window + 1) :].clone()
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        super().reset()
        self.conv_inputs = None

    def offload(self) -> None:
        super().offload()
        self._map_conv_inputs(lambda inputs: inputs.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        super().prefetch()
        self._map_conv_inputs(lambda inputs: inputs.to(self.device, non_blocking=True))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._map_conv_inputs(lambda inputs: inputs.index_select(0, beam_idx.to(inputs.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._map_conv_inputs(lambda inputs: inputs.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._map_conv_inputs(lambda inputs: inputs[indices])

    def _map_conv_inputs(self, change) -> None:
        if self.conv_inputs is not None:
            self.conv_inputs = change(self.conv_inputs)


class ConvDynamicLayer(ConvStateMixin, DynamicLayer):
    """A cache layer that grows with the sequence, with convolution state."""


class ConvStaticLayer(ConvStateMixin, StaticLayer):
    """A cache layer of fixed length, with convolution state.

    The convolution state is replaced, not written in place, so the layer does not claim to be
    compilable; transformers then runs `generate` on it without compiling.
    """

    is_compileable = False


class CatCache(DynamicCache):
    """transformers' `DynamicCache` for a CAT model.

    A plain `DynamicCache` or `StaticCache` that is still empty serves as well: the model gives its
    layers the convolution state when it first sees it.
    """

    def __init__(self, config: CatConfig):
        super().__init__(config=config)
        attach_conv_state(self, config)


def attach_conv_state(cache: Cache, config: CatConfig) -> None:
    """Makes the layers of `cache`, in place, able to hold convolution inputs.

    Raises `ValueError` for a cache that holds tokens already (their convolution inputs are unknown)
    and for kinds of cache layers that have no counterpart with convolution state.
    """
    if not config.convolved_streams or config.conv_window == 1:
        return
    if getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:
        cache.layer_class_to_replicate = ConvDynamicLayer
        missing = config.num_hidden_layers - len(cache.layers)
        cache.layers.extend(ConvDynamicLayer() for _ in range(missing))
    cache.layers[:] = [_with_conv_state(layer) for layer in cache.layers]


def _with_conv_state(layer):
    if isinstance(layer, ConvStateMixin):
        return layer
    if type(layer) not in (DynamicLayer, StaticLayer):
        raise ValueError(
            f"a cache of {type(layer).__name__} cannot hold convolution inputs; use CatCache, "
            "DynamicCache or StaticCache, or use_cache=False"
        )
    if layer.is_initialized and layer.get_seq_length() > 0:
        raise ValueError(
            "this cache holds keys and values without the convolution inputs before them; "
            "start from an empty cache"
        )
    if isinstance(layer, StaticLayer):
        return ConvStaticLayer(max_cache_len=layer.max_cache_len)
    return ConvDynamicLayer()
