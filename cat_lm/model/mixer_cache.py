"""Decoding state of language models whose layers keep a state, not keys and values."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer

from cat_lm.model.cache import PaddingRecord


class MixerState:
    """Hold tensors by name; hooks of accelerate hand on a copy of what is a Mapping."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self._tensors[name] = tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def get(self, name: str, default: Any = None) -> Any:
        return self._tensors.get(name, default)

    def items(self) -> ItemsView[str, Tensor]:
        return self._tensors.items()

    def values(self) -> ValuesView[Tensor]:
        return self._tensors.values()

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors.update(tensors)

    def clear(self) -> None:
        self._tensors.clear()


class MixerCacheLayer(PaddingRecord, DynamicLayer):
    """Hold what a layer's mixer keeps of the tokens so far, instead of keys and values.

    Attributes:
        state: tensors by name, rows first; the mixer changes it.
        length: the tokens so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state = MixerState()
        self.length = 0

    def update(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Refuse keys and values: no module of the model has any to store."""
        raise RuntimeError("this cache holds the states of mixers, not keys and values")

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def reset(self) -> None:
        self.state.clear()
        self.length, self.real = 0, None

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: a state cannot go back."""
        if tokens_to_remove:
            raise RuntimeError(
                f"cannot remove {abs(tokens_to_remove)} tokens: a mixer's state cannot go back"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change(lambda x: x[indices])

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self._change_record(change)
        self.state.update({name: change(x) for name, x in self.state.items()})


class MixerCache(Cache):
    """The states of all layers."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(layers=[MixerCacheLayer() for _ in range(config.num_hidden_layers)])


def cache_for(
    config: PreTrainedConfig, cache: Cache | None, use_cache: bool | None
) -> MixerCache | None:
    """Return the cache that a call works with; none where the mixer keeps no state.

    Args:
        config: says by `keeps_state` whether it does.

    Raises:
        ValueError: a cache of another kind, or of a mixer without state.
    """
    if cache is None:
        return MixerCache(config) if use_cache and config.keeps_state else None
    if not config.keeps_state:
        raise ValueError(
            f"past_key_values: the mixer {config.mixer} keeps no state; give all tokens each time"
        )
    if not isinstance(cache, MixerCache):
        raise ValueError(
            f"past_key_values: a {type(cache).__name__} cannot hold the states of mixers; use "
            "cat_lm.model.mixer_cache.MixerCache(config), or none"
        )
    return cache
