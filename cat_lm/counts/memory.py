"""What autograd keeps of a micro-batch, what ranks exchange, and the decoding state."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cat_lm.counts.fake import FakeModel, fake_model
from cat_lm.ops.runtime.fake import standing_for_gpu

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# A decoding state is linear in its tokens: of more than these it follows from two lengths.
_MEASURED = 4096


@dataclass(frozen=True)
class Saved:
    """Bytes that the backward pass of a micro-batch finds kept, and that its forward pass sends.

    Attributes:
        rest: outside of the layers: embedding, head, loss, and what layers share.
        layers: of all layers.
        largest: of the layer that keeps most.
        streams: what all layers read.
        sent: to the ranks that share the sequences.
    """

    rest: float
    layers: float
    largest: float
    streams: float
    sent: float


class _Kept:
    """Counts what autograd saves, by the layer that runs; every storage once."""

    def __init__(self, fake: FakeModel) -> None:
        self.running: int | None = None
        self.bytes: dict[int | None, float] = defaultdict(float)
        self.streams = [0.0] * len(fake.layers)
        self._alive: list[Tensor] = []  # or another storage could take its number
        self._seen = {x.untyped_storage()._cdata for x in fake.model.parameters()}
        for number, layer in enumerate(fake.layers):
            layer.register_forward_pre_hook(self._enter(number))
            layer.register_forward_hook(self._leave)

    def _enter(self, number: int) -> Any:
        def enter(_: Any, inputs: tuple[Any, ...]) -> None:
            self.running = number
            self.streams[number] = _size(inputs[0])

        return enter

    def _leave(self, *_: Any) -> None:
        self.running = None

    def pack(self, x: Tensor) -> Tensor:
        """Take note of a tensor that is saved."""
        storage = x.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._alive.append(x)
            self.bytes[self.running] += storage.nbytes()
        return x


def saved_bytes(
    meta: PreTrainedModel,
    rows: int,
    length: int,
    *,
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
    documents: bool = False,
    parts: int = 1,
    on_gpu: bool = False,
) -> Saved:
    """Measure what autograd keeps of a forward pass in training, with the loss.

    Recurrences keep what this project's own operators do, and multi-token attention's documents are
    counted as one a row.

    Args:
        meta: the model on the meta device, which is used up.
        dtype: of the parameters.
        autocast: whether layers compute in bf16 under autocast.
        documents: whether masks are made for packed documents.
        parts: how many ranks share a sequence.
        on_gpu: whether a GPU's kernels compute landmark attention.
    """
    with fake_model(meta, dtype) as fake, standing_for_gpu(on_gpu):
        group = fake.divide(parts)
        kept = _Kept(fake)
        ids = torch.zeros(rows, length, dtype=torch.long)
        packed = {"document_ids": ids} if documents else {}
        own = ids[:, : length // parts]
        fake.model.train()
        hooks = torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda x: x)
        with hooks, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs = fake.model(
                input_ids=own, shift_labels=own, skip_logits=True, use_cache=False, **packed
            )
        del outputs
        layers = [kept.bytes[number] for number in range(len(fake.layers))]
        return Saved(
            rest=kept.bytes[None],
            layers=fake.whole(0, layers),
            largest=max(layers, default=0),
            streams=fake.whole(0, kept.streams),
            sent=0 if group is None else group.sent / len(layers) * sum(fake.times),
        )


def state_bytes(meta: PreTrainedModel, length: int, dtype: torch.dtype = torch.float32) -> float:
    """Measure the decoding state of one sequence after `length` tokens.

    Of a model without state, of which the whole sequence is computed anew for each token, it is
    what its layers hand over.

    Args:
        meta: the model on the meta device, which is used up.
        dtype: of the parameters.
    """
    if not (meta.keeps_state and getattr(meta.config, "keeps_state", True)):
        width = meta.config.num_hidden_layers * meta.config.hidden_size
        return width * length * dtype.itemsize
    with fake_model(meta, dtype) as fake, torch.no_grad():
        fake.model.eval()
        if length <= _MEASURED:
            return _state(fake, length)
        half, whole = _state(fake, _MEASURED // 2), _state(fake, _MEASURED)
        return whole + (whole - half) / (_MEASURED // 2) * (length - _MEASURED)


def _state(fake: FakeModel, length: int) -> float:
    ids = torch.zeros(1, length, dtype=torch.long)
    cache = fake.model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
    found = [sum(map(_size, _tensors(_own(layer)))) for layer in cache.layers]
    return fake.whole(0, found) if fake.layers else sum(found)


def _own(layer: Any) -> dict[str, Any]:
    """Return what a cache's layer holds, without buffers that have room for more."""
    return {name: value for name, value in vars(layer).items() if not name.startswith("_")}


def _size(x: Tensor) -> int:
    return x.numel() * x.itemsize


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [x for one in value for x in _tensors(one)]
