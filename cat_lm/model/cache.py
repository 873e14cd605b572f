"""Decoding state: transformers' keys and values, and named states of the layers.

A layer's cache holds two kinds of state beside keys and values, each under a name of its own:
`inputs`, the newest inputs of something that reads W tokens (a convolution), and `recurrent`, a
tensor that every step replaces (a recurrence). Whatever moves, reorders or clears keys and values
does it to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, StaticLayer

if TYPE_CHECKING:
    from cat_lm.model.attention.settings import AttentionSettings


class LayerStateMixin:
    """A mixin that adds named states to a cache layer of transformers.

    Attributes:
        inputs: by name, the newest inputs [B, n, ...] of what reads W tokens; none before the first
            token.
        windows: by name, W.
        recurrent: by name, the state [B, ...] after the newest token.
        real: [B, n] bool, False at padding, of the first n tokens; later ones are real. None where
            all are. A model keeps it in its first layer.
    """

    # The first dimension is the batch; a tensor may be None.
    tensors: ClassVar[tuple[str, ...]] = ("keys", "values", "real")

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.inputs: dict[str, Tensor] = {}
        self.windows: dict[str, int] = {}
        self.recurrent: dict[str, Tensor] = {}
        self.real: Tensor | None = None

    def exchange_inputs(
        self, name: str, inputs: Tensor, window: int, padding_mask: Tensor | None = None
    ) -> Tensor:
        """Store `inputs` [B, T, ...] and return the W−1 inputs before them, zeros before the start.

        Where a row ends in padding (`padding_mask` [B, T] bool), its newest inputs are those of its
        last real tokens, so that a right-padded prompt continues like one without padding.
        """
        raise NotImplementedError

    def newest_inputs(self, name: str, window: int) -> Tensor | None:
        """Return the at most W−1 inputs [B, n, ...] before the next token.

        None where it takes `exchange_inputs` to know them, or to keep more of them.
        """
        inputs = self.inputs.get(name)
        return None if inputs is None or inputs.shape[1] >= window else inputs

    def replace_inputs(self, name: str, inputs: Tensor) -> None:
        """Replace the inputs of `newest_inputs` by `inputs` [B, n, ...]."""
        self.inputs[name] = inputs

    def replace_recurrent(self, name: str, state: Tensor) -> None:
        """Replace the recurrent state [B, ...] by the one after the newest token."""
        self.recurrent[name] = state.detach()

    def reset(self) -> None:
        super().reset()
        self.inputs.clear()
        self.recurrent.clear()
        self.real = None

    def offload(self) -> None:
        self._change_states(lambda state: state.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._change_states(lambda state: state.to(self.device, non_blocking=True))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change_states(lambda state: state.index_select(0, beam_idx.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change_states(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change_states(lambda state: state[indices])

    def _change_states(self, change: Callable[[Tensor], Tensor]) -> None:
        for name in self.tensors:
            held = getattr(self, name)
            if held is not None and held.numel():
                setattr(self, name, change(held))
        for states in (self.inputs, self.recurrent):
            states.update({name: change(state) for name, state in states.items()})


def _skip_trailing_padding(history: Tensor, padding_mask: Tensor) -> Tensor:
    # The trailing padding of each row, [B].
    trailing = (padding_mask.flip(1).cumsum(1) == 0).sum(1)
    source = torch.arange(history.shape[1], device=history.device) - trailing[:, None]
    rows = torch.arange(history.shape[0], device=history.device)[:, None]
    shifted = history[rows, source.clamp(min=0)]
    before_start = (source < 0).view(*source.shape, *[1] * (history.ndim - 2))
    return shifted.masked_fill(before_start, 0.0)


class StateDynamicLayer(LayerStateMixin, DynamicLayer):
    """A cache layer that grows with the sequence, with named states.

    Cropping needs inputs older than the last W−1, which are kept after `activate_past_recording()`
    (assisted decoding calls it). A crop that needs inputs that are gone, or a recurrent state to go
    back, raises `RuntimeError`.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.record_past = False

    def exchange_inputs(
        self, name: str, inputs: Tensor, window: int, padding_mask: Tensor | None = None
    ) -> Tensor:
        past = self.inputs.get(name, inputs[:, :0])
        before = past[:, max(0, past.shape[1] - window + 1) :]
        missing = window - 1 - before.shape[1]
        if missing > 0:
            zeros = inputs.new_zeros(inputs.shape[0], missing, *inputs.shape[2:])
            before = torch.cat([zeros, before], dim=1)

        history = torch.cat([past, inputs.detach()], dim=1)
        if padding_mask is not None and self._may_end_in_padding(padding_mask):
            if self.record_past:
                raise RuntimeError("a cache that records its past cannot take right-padded input")
            history = _skip_trailing_padding(history, padding_mask)
        if not self.record_past:
            # A slice would keep the prompt's memory alive.
            history = history[:, -(window - 1) :].clone()
        self.inputs[name], self.windows[name] = history, window
        return before

    def _may_end_in_padding(self, padding_mask: Tensor) -> bool:
        return not padding_mask[:, -1].all()

    def newest_inputs(self, name: str, window: int) -> Tensor | None:
        return None if self.record_past else super().newest_inputs(name, window)

    def reset(self) -> None:
        super().reset()
        # Older transformers versions fill keys and values with zeros and keep their length.
        self.keys = self.values = None
        self.is_initialized = False

    def activate_past_recording(self) -> None:
        """Keep all inputs from now on, until the next crop."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give the tokens to remove as a negative")
        removed = -tokens_to_remove
        if removed and self.recurrent:
            states = f"the recurrent states {', '.join(self.recurrent)}"
            raise RuntimeError(f"cannot remove {removed} tokens: {states} cannot go back")
        self.inputs.update({name: self._cropped(name, removed) for name in self.inputs})
        super().crop(tokens_to_remove)
        if self.real is not None:
            self.real = self.real[:, : self.get_seq_length()]

    def _cropped(self, name: str, removed: int) -> Tensor:
        inputs, window = self.inputs[name], self.windows[name]
        left = inputs.shape[1] - removed
        tokens_left = max(0, self.get_seq_length() - removed)
        if left < min(window - 1, tokens_left):
            raise RuntimeError(
                f"cannot remove {removed} tokens: the convolution inputs before them are gone; "
                "call activate_past_recording() before feeding tokens that may be removed"
            )
        kept = inputs[:, : max(0, left)]
        return kept[:, max(0, kept.shape[1] - window + 1) :].clone()


class RecurrentLayer(StateDynamicLayer):
    """A cache layer of a mixer that keeps only named states, no keys and values.

    Attributes:
        length: the tokens so far; the model counts them.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.length = 0

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Raise an error: `get_seq_length` would not count keys and values."""
        raise RuntimeError("this cache holds the states of mixers, not keys and values")

    def _may_end_in_padding(self, padding_mask: Tensor) -> bool:
        return True  # A check would synchronise with the GPU.

    def get_seq_length(self) -> int:
        return self.length

    def reset(self) -> None:
        super().reset()
        self.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise RuntimeError(
                f"cannot remove {abs(tokens_to_remove)} tokens: a mixer's state cannot go back"
            )


class StateStaticLayer(LayerStateMixin, StaticLayer):
    """A cache layer of fixed length, whose named states are overwritten in place."""

    def exchange_inputs(
        self, name: str, inputs: Tensor, window: int, padding_mask: Tensor | None = None
    ) -> Tensor:
        if name not in self.inputs:
            shape = (inputs.shape[0], window - 1, *inputs.shape[2:])
            self.inputs[name] = _at_fixed_address(inputs.new_zeros(shape))
            self.windows[name] = window
        history = torch.cat([self.inputs[name], inputs.detach()], dim=1)
        before = history[:, : window - 1]
        if padding_mask is not None:
            history = _skip_trailing_padding(history, padding_mask)
        self.inputs[name].copy_(history[:, -(window - 1) :])
        return before

    def replace_inputs(self, name: str, inputs: Tensor) -> None:
        self.inputs[name].copy_(inputs)

    def replace_recurrent(self, name: str, state: Tensor) -> None:
        if name in self.recurrent:
            self.recurrent[name].copy_(state.detach())
        else:
            self.recurrent[name] = _at_fixed_address(state.detach().clone())

    def reset(self) -> None:
        kept = dict(self.inputs), dict(self.recurrent)
        super().reset()
        for states, tensors in zip((self.inputs, self.recurrent), kept, strict=True):
            states.update({name: tensor.zero_() for name, tensor in tensors.items()})


def _at_fixed_address(state: Tensor) -> Tensor:
    """Mark a tensor's address as static for CUDA graphs, as transformers does for keys."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(state)
    return state


class CatCache(DynamicCache):
    """transformers' `DynamicCache` for a CAT model of any family.

    A plain `DynamicCache` or `StaticCache` that is still empty serves as well.
    """

    def __init__(self, config: AttentionSettings):
        # For recurrent models transformers would create its own cache layers.
        super().__init__(config=config if config.attends else None)
        attach_layer_state(self, config)


_CANNOT_HOLD = (
    "past_key_values: a cache of {} cannot hold states; use CatCache(config), or use_cache=False"
)


def attach_layer_state(cache: Cache, config: PreTrainedConfig) -> None:
    """Enable the layers of `cache`, in place, to hold named states if the model has any.

    Raises:
        ValueError: it holds tokens, the states after which are unknown, or other kinds of layers.
    """
    if not getattr(config, "keeps_state", True):
        raise ValueError(
            f"past_key_values: the mixer {config.mixer} keeps no state; give all tokens each time"
        )
    if not getattr(config, "needs_layer_state", False):
        return
    if not hasattr(cache, "layers"):
        raise ValueError(_CANNOT_HOLD.format(type(cache).__name__))
    # The cache layers of the attention pattern, if it has its own.
    own = getattr(config, "cache_layers", None)
    dynamic, static = own or (StateDynamicLayer, StateStaticLayer)
    if getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:
        cache.layer_class_to_replicate = dynamic
        missing = config.num_hidden_layers - len(cache.layers)
        cache.layers.extend(dynamic() for _ in range(missing))
    if not all(isinstance(layer, dynamic | static) for layer in cache.layers):
        cache.layers[:] = [_with_states(layer, dynamic, static) for layer in cache.layers]


def _with_states(
    layer: CacheLayerMixin, dynamic: type[StateDynamicLayer], static: type[StateStaticLayer]
) -> LayerStateMixin:
    if isinstance(layer, dynamic | static):
        return layer
    known = (DynamicLayer, StaticLayer, StateDynamicLayer, StateStaticLayer)
    if type(layer) not in known or (isinstance(layer, StaticLayer) and static is dynamic):
        raise ValueError(_CANNOT_HOLD.format(type(layer).__name__))
    if layer.is_initialized and layer.get_seq_length() > 0:
        raise ValueError(
            "this cache holds keys and values without the states before them; start from an empty "
            "cache"
        )
    if isinstance(layer, StaticLayer):
        return static(max_cache_len=layer.max_cache_len)
    return dynamic()


def without_plans(cache: Cache | None, x: Tensor) -> AbstractContextManager[None]:
    """Exclude cuDNN's attention from a pass over x with a cache on a GPU.

    It plans for each number of keys anew, which takes longer than a token does.
    """
    if cache is None or x.device.type != "cuda" or torch.compiler.is_compiling():
        return nullcontext()
    return _without_cudnn()


@contextmanager
def _without_cudnn() -> Iterator[None]:
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)


def count_tokens(cache: Cache | None, time: int) -> None:
    """Count the tokens read by layers without keys and values."""
    for part in () if cache is None else cache.layers:
        if isinstance(part, RecurrentLayer):
            part.length += time


def follows_cache(cache: Cache | None, index: int) -> bool:
    """Return True if a layer's attention reads cached keys in addition to the new ones.

    A static layer's keys always are more than the new ones: those that are still to come.
    """
    if cache is None or index >= len(cache.layers):
        return False
    part = cache.layers[index]
    return isinstance(part, StaticLayer) or part.get_seq_length() > 0
