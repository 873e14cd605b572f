"""What a forward pass keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def kept_bytes(model: nn.Module, forward: Callable[[], object]) -> int:
    """Bytes of the tensors that autograd keeps of a call, each storage once, beside parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(s.nbytes() for at, s in kept.items() if at not in own)


def kept_of_tokens(model: nn.Module, ids: Tensor, documents: bool) -> int:
    """The same of a model that reads ids [B, T], packed with documents of 37 tokens or not."""
    borders = (torch.arange(ids.shape[1]) // 37).expand(ids.shape) if documents else None
    return kept_bytes(model, lambda: model(ids, use_cache=False, document_ids=borders))
