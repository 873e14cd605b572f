"""Decoding state: keys and values as in transformers, and the last W−1 convolution inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticLayer

from cat_lm.model.configuration import CatConfig


class ConvStateMixin:
    """Adds the inputs of a layer's convolutions to a cache layer of transformers.

    `conv_inputs` is [B, n, H, S, D]: the newest inputs (the projection without its bias) of the S
    convolved streams; None before the first token. Whatever moves, reorders or clears keys and
    values does it to them.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.conv_inputs: Tensor | None = None
        self.conv_window: int | None = None

    def exchange_conv_inputs(
        self, inputs: Tensor, window: int, padding_mask: Tensor | None = None
    ) -> Tensor:
        """Stores `inputs` [B, T, H, S, D] and returns the W−1 inputs before them.

        The result is [B, W−1, H, S, D], with zeros before the start of the sequence. Where a row
        ends in padding (`padding_mask` [B, T] bool), its newest inputs are those of its last real
        tokens, so that a right-padded prompt continues like one without padding.
        """
        raise NotImplementedError

    def reset(self) -> None:
        super().reset()
        self.conv_inputs = None

    def offload(self) -> None:
        super().offload()
        self._change_conv_inputs(lambda inputs: inputs.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        super().prefetch()
        self._change_conv_inputs(lambda inputs: inputs.to(self.device, non_blocking=True))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._change_conv_inputs(lambda inputs: inputs.index_select(0, beam_idx.to(inputs.device)))

    def _change_conv_inputs(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.conv_inputs is not None:
            self.conv_inputs = change(self.conv_inputs)


def _skip_trailing_padding(history: Tensor, padding_mask: Tensor) -> Tensor:
    """Shifts rows of `history` that end in padding, so that they end in a real token's inputs."""
    trailing = (padding_mask.flip(1).cumsum(1) == 0).sum(1)  # [B]
    source = torch.arange(history.shape[1], device=history.device) - trailing[:, None]
    rows = torch.arange(history.shape[0], device=history.device)[:, None]
    shifted = history[rows, source.clamp(min=0)]
    return shifted.masked_fill((source < 0)[:, :, None, None, None], 0.0)


class ConvDynamicLayer(ConvStateMixin, DynamicLayer):
    """A cache layer that grows with the sequence, with convolution state.

    Cropping needs inputs older than the last W−1. They are kept after `activate_past_recording()`,
    as in transformers' own convolution caches (assisted decoding calls it); a crop that would need
    inputs that are gone raises `RuntimeError`.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.record_past = False

    def exchange_conv_inputs(
        self, inputs: Tensor, window: int, padding_mask: Tensor | None = None
    ) -> Tensor:
        past = inputs[:, :0] if self.conv_inputs is None else self.conv_inputs
        before = past[:, max(0, past.shape[1] - window + 1) :]
        missing = window - 1 - before.shape[1]
        if missing > 0:
            zeros = inputs.new_zeros(inputs.shape[0], missing, *inputs.shape[2:])
            before = torch.cat([zeros, before], dim=1)

        history = torch.cat([past, inputs.detach()], dim=1)
        if padding_mask is not None and not padding_mask[:, -1].all():
            if self.record_past:
                raise RuntimeError("a cache that records its past cannot take right-padded input")
            history = _skip_trailing_padding(history, padding_mask)
        if not self.record_past:
            history = history[:, -(window - 1) :].clone()  # a slice would keep the prompt's memory
        self.conv_inputs, self.conv_window = history, window
        return before

    def reset(self) -> None:
        super().reset()
        # Older versions of transformers fill keys and values with zeros and keep their length.
        self.keys = self.values = None
        self.is_initialized = False

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

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._change_conv_inputs(lambda inputs: inputs.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._change_conv_inputs(lambda inputs: inputs[indices])


class ConvStaticLayer(ConvStateMixin, StaticLayer):
    """A cache layer of fixed length, with W−1 convolution inputs that are overwritten in place."""

    def exchange_conv_inputs(
        self, inputs: Tensor, window: int, padding_mask: Tensor | None = None
    ) -> Tensor:
        if self.conv_inputs is None:
            shape = (inputs.shape[0], window - 1, *inputs.shape[2:])
            self.conv_inputs, self.conv_window = inputs.new_zeros(shape), window
            if not torch.compiler.is_compiling():
                # As transformers marks keys and values: CUDA graphs rely on the address.
                torch._dynamo.mark_static_address(self.conv_inputs)
        history = torch.cat([self.conv_inputs, inputs.detach()], dim=1)
        before = history[:, : window - 1]
        if padding_mask is not None:
            history = _skip_trailing_padding(history, padding_mask)
        self.conv_inputs.copy_(history[:, -(window - 1) :])
        return before

    def reset(self) -> None:
        address = self.conv_inputs
        super().reset()
        if address is not None:
            self.conv_inputs = address.zero_()


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
    if not config.embedding_streams or config.conv_window == 1:
        return
    if getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:
        cache.layer_class_to_replicate = ConvDynamicLayer
        missing = config.num_hidden_layers - len(cache.layers)
        cache.layers.extend(ConvDynamicLayer() for _ in range(missing))
    if not all(isinstance(layer, ConvStateMixin) for layer in cache.layers):
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
