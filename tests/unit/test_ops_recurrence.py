"""Memory of the delta rule."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from cat_lm.ops.recurrence.delta_rule import CHUNK, delta_rule


def kept_bytes(time: int) -> int:
    """What the delta rule keeps for its gradients."""
    torch.manual_seed(time)
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor

    q, k = F.normalize(torch.randn(2, 1, time, 2, 3), dim=-1)
    v, rate, decay = torch.randn(1, time, 2, 4), torch.rand(1, time, 2), -torch.rand(1, time, 2)
    streams = [x.requires_grad_() for x in (q, k, v, rate, decay)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        delta_rule(*streams)
    return sum(storage.nbytes() for storage in storages.values())


def test_memory_is_linear_in_length():
    short, long = kept_bytes(4 * CHUNK), kept_bytes(16 * CHUNK)
    assert 3.5 * short < long < 4.5 * short
