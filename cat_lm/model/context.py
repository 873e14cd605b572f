"""The context of a batch: what a layer needs in addition to its hidden states x [B, T, C]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

    from cat_lm.model.cache import LayerStateMixin
    from cat_lm.model.sequence import SequenceGroup


@dataclass
class Context:
    """The layout of a batch's rows, and the decoding state of a layer.

    A mixer called by itself needs no more than `documents`, `padding`, `state` and `losses`.

    Attributes:
        documents: [B, T] numbers; where the number changes a document starts, which reads no other.
            None where rows are not packed.
        padding: [B, T] bool, False at padding, which no real token reads; None where there is none.
        state: the layer's decoding state, see `cat_lm.model.cache`; None outside decoding.
        losses: takes losses of the layers' own, numbers; None where nobody asks for them.
        group: the ranks that share sequences; None for one alone.
        conv_backend: what computes convolutions, `auto` or one of `cat_lm.ops.BACKENDS`.
        mixer_backend: the same of recurrences, see `cat_lm.ops.recurrence.backends`.
        cache: keys and values of all layers; None outside decoding.
        layer: the layer's number, by which it finds its own in the cache.
        continues: whether attention reads keys that are not among the new ones.
        document_positions: [B, T] int32, the position of each token in its document, if known.
        document_borders: those of all documents, see `cat_lm.ops.runtime.documents`, if known.
        positions: [B or 1, T], of the tokens in their documents, padding left out.
        key_positions: [B or 1, S], of all keys, if something reads them; None for all slots.
        rotary: cosines and sines, [B or 1, T, rotated channels]; None for no rotation.
        mask: what the pattern of attention takes as a mask.
        by_rows: whether logits are computed for some queries at a time, and no mask is made.
        arguments: further arguments of transformers' attention function.
    """

    documents: Tensor | None = None
    padding: Tensor | None = None
    state: LayerStateMixin | None = None
    losses: list[Tensor] | None = None
    group: SequenceGroup | None = None
    conv_backend: str = "auto"
    mixer_backend: str = "auto"
    cache: Cache | None = None
    layer: int = 0
    continues: bool = False
    document_positions: Tensor | None = None
    document_borders: Tensor | None = None
    positions: Tensor | None = None
    key_positions: Tensor | None = None
    rotary: tuple[Tensor, Tensor] | None = None
    mask: Any = None
    by_rows: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)

    def to(self, device: torch.device | str | int, **how: Any) -> Context:
        """Return the context with its tensors on a device; caches and lists are shared."""
        # accelerate calls this if a model's layers are on several devices.

        def moved(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(device, **how)
            if isinstance(value, tuple):
                return tuple(map(moved, value))
            if isinstance(value, dict):
                return {name: moved(one) for name, one in value.items()}
            # A block mask of flex attention moves as a tensor does.
            return value.to(device) if hasattr(value, "mask_mod") else value

        return replace(self, **{f.name: moved(getattr(self, f.name)) for f in fields(self)})

    def part(self, before: int) -> Context:
        """Return the context of this rank's part of a sequence, with `before` tokens in front of
        it.
        """
        rotary = self.rotary
        if rotary is not None:
            rotary = tuple(self.group.part(angles, before) for angles in rotary)
        return Context(
            documents=self.group.part(self.documents, before),
            rotary=rotary,
            conv_backend=self.conv_backend,
        )

    def without_padding(self, x: Tensor) -> Tensor:
        """Return x [B, T, …] with zeros at padding."""
        if self.padding is None:
            return x
        real = self.padding.view(*self.padding.shape, *[1] * (x.dim() - 2))
        return x.masked_fill(~real, 0.0)

    def inputs_before(self, name: str, x: Tensor, window: int) -> Tensor | None:
        """Store x [B, T, …] and return the W−1 inputs before it, [B, W−1, …]; None if they are all
        0.
        """
        if self.state is None:
            return None
        is_first = name not in self.state.inputs
        before = self.state.exchange_inputs(name, x, window, self.padding)
        return None if is_first else before

    def recur(self, operator: Callable[..., Any], *streams: Tensor) -> Tensor:
        """Run a recurrence from the stored state, if there is one, and store its new state.

        Args:
            operator: takes `streams`, `document_ids`, and with a state `initial_state` and
                `return_state`, as those of `cat_lm.ops.recurrence`.
        """
        state = self.state
        if state is None:
            return operator(*streams, document_ids=self.documents)
        y, last = operator(
            *streams,
            document_ids=self.documents,
            initial_state=state.recurrent.get("memory"),
            return_state=True,
        )
        state.replace_recurrent("memory", last)
        return y


def layer_context(context: Context, index: int) -> Context:
    """Return the context of one layer, with its part of the cache."""
    from cat_lm.model.cache import LayerStateMixin, follows_cache  # This import loads transformers.

    cache, state = context.cache, None
    # A layer may have no cache yet: transformers can create it when it is first filled.
    if cache is not None and index < len(cache.layers):
        part = cache.layers[index]
        state = part if isinstance(part, LayerStateMixin) else None
    continues = follows_cache(cache, index)
    return replace(context, layer=index, state=state, continues=continues)


def at_least_fp32(x: Tensor) -> Tensor:
    """Cast half precision to fp32: rates enter exponentials, which amplify rounding."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
