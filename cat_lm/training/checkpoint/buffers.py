"""Buffers: what a model holds beside its parameters, the same on all ranks and in checkpoints.

Models of this project have none to save (rotary frequencies are computed from the configuration).
A plugin's may: features that its constructor draws, a codebook, running statistics. DeepSpeed sends
and saves parameters only, so that what is done with buffers is here:

- All ranks begin with the first one's, whatever each drew.
- Persistent ones are saved with the weights, as the first rank has them, and restored.

One that changes in training must change alike on all ranks, which sums over them do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from cat_lm.training.distributed import Ranks

# safetensors' names of what can be saved.
TYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool},
}
_NAMES = {dtype: name for name, dtype in TYPES.items()}


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all buffers; one that several modules hold has several names."""
    return dict(model.named_buffers(remove_duplicate=False))


def persistent(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return those that belong to the model's state, which is saved."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in named(model).items() if name in saved}


def make_fillable(model: nn.Module) -> None:
    """Make buffers contiguous: after `Tensor.expand` numbers share their places."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.contiguous()


def wrong_type(stored: str, buffer: torch.Tensor) -> str | None:
    """Return what a stored type must be for a buffer; None where it can be. Floats may differ."""
    found = TYPES.get(stored)
    if found == buffer.dtype:
        return None
    if found is not None and found.is_floating_point and buffer.is_floating_point():
        return None
    return _NAMES[buffer.dtype]


@torch.no_grad()
def share(model: nn.Module, ranks: Ranks) -> None:
    """Broadcast the first rank's buffers (a collective)."""
    make_fillable(model)
    if ranks.world_size == 1:
        return
    for buffer in named(model).values():
        if buffer.numel() > 0:
            torch.distributed.broadcast(_bytes(buffer), src=0)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Put buffers back afterwards as they were."""
    every = [(m._buffers, *held) for m in model.modules() for held in m._buffers.items()]
    values = [None if buffer is None else buffer.clone() for _, _, buffer in every]
    try:
        yield
    finally:
        for (held, name, buffer), value in zip(every, values, strict=True):
            held[name] = None if buffer is None else buffer.copy_(value)


def to_save(model: nn.Module, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Copy the persistent buffers to the CPU of the first rank; others get none."""
    if not ranks.is_first:
        return {}
    found = {name: b.detach().to("cpu", copy=True) for name, b in persistent(model).items()}
    # safetensors writes contiguous ones alone, and forward may have put others in their place.
    return {name: buffer.contiguous() for name, buffer in found.items()}


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as bytes, which every backend sends, NaN and booleans too."""
    return buffer.detach().view(-1).view(torch.uint8)
