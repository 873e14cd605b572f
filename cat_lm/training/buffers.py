"""Buffers: what a model holds beside its parameters, the same on all ranks and in checkpoints.

Models of this project have none to save (rotary frequencies are computed from the configuration).
A plugin's may: features that its constructor draws, a codebook, running statistics. DeepSpeed sends
and saves parameters only, so that what is done with buffers is here:

- All ranks begin with the first one's, whatever each drew.
- Persistent ones are saved with the weights, as they are, and restored.
- One that changes in training must change alike on all ranks, which sums over them do. The dry-run
  batch tries it before the first step, and every checkpoint compares the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import xxhash
from torch import nn

from cat_lm.errors import SharedError, UserError

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
    """Give all buffers; one that several modules hold has several names."""
    return dict(model.named_buffers(remove_duplicate=False))


def persistent(model: nn.Module) -> dict[str, torch.Tensor]:
    """Give those that belong to the model's state, which is saved."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in named(model).items() if name in saved}


def check(model: nn.Module) -> None:
    """Check that a model's buffers can be saved, and then loaded.

    Raises:
        ValueError: naming the buffer and what would be right.
    """
    for name, buffer in persistent(model).items():
        if buffer.dtype not in _NAMES:
            raise ValueError(
                f"buffer {name} is of {buffer.dtype}, which no checkpoint holds; must be one of "
                f"{', '.join(TYPES)}, or be computed in forward"
            )
        if not buffer.is_meta and not buffer.isfinite().all():
            raise ValueError(
                f"buffer {name} holds numbers that are not finite, which no checkpoint may; make "
                "of a mask a tensor of booleans, or compute it in forward"
            )


def make_fillable(model: nn.Module) -> None:
    """Give each number of a buffer a place of its own, which `Tensor.expand` does not."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.contiguous()


def wrong_type(stored: str, buffer: torch.Tensor) -> str | None:
    """Say what a stored type must be for a buffer; None where it can be. Floats may differ."""
    found = TYPES.get(stored)
    if found == buffer.dtype:
        return None
    if found is not None and found.is_floating_point and buffer.is_floating_point():
        return None
    return _NAMES[buffer.dtype]


@torch.no_grad()
def share(model: nn.Module, ranks: Ranks) -> None:
    """Give every rank the first one's buffers (a collective).

    Raises:
        SharedError: a rank has others, or of other shapes.
    """
    make_fillable(model)
    if ranks.world_size == 1:
        return
    own = {name: (list(b.shape), str(b.dtype)) for name, b in named(model).items()}
    first = ranks.broadcast(own)
    ranks.on_all_ranks(lambda: _check_same(own, first, ranks.rank))
    for buffer in named(model).values():
        if buffer.numel() > 0:
            torch.distributed.broadcast(_bytes(buffer), src=0)


def _check_same(own: Mapping, first: Mapping, rank: int) -> None:
    for name in sorted(own.keys() | first.keys()):
        if own.get(name) != first.get(name):
            raise UserError(
                f"model: buffer {name} is {own.get(name, 'none')} on rank {rank} and "
                f"{first.get(name, 'none')} on rank 0; must be of one shape and type on all"
            )


@contextmanager
def tried(model: nn.Module, ranks: Ranks) -> Iterator[None]:
    """Put buffers back as they were; see what a batch, another on each rank, made of them.

    A collective where nothing fails inside.

    Raises:
        SharedError: one that a resumed run, or another rank, would not have.
    """
    before = {name: buffer.clone() for name, buffer in named(model).items()}
    saved = persistent(model).keys()
    try:
        yield
        ranks.on_all_ranks(lambda: _check_changes(model, before, saved))
        _check_alike(model, ranks)
    finally:
        _put_back(model, before)


def _check_changes(model: nn.Module, before: Mapping, saved: set[str]) -> None:
    """Check that what changed is what was there, and is saved. Raises UserError."""
    now, is_saved = named(model), persistent(model).keys()
    for name in sorted(saved | is_saved):
        if name not in saved or name not in is_saved or _form(now[name]) != _form(before[name]):
            raise UserError(
                f"model: buffer {name} is made, or gets another shape, in the forward pass, where "
                "no loaded model would have it; register it in the constructor as it will be, or "
                "with persistent=False what is computed anew"
            )
    for name in sorted((before.keys() & now.keys()) - saved):
        if _form(now[name]) == _form(before[name]) and _digest(now[name]) != _digest(before[name]):
            raise UserError(
                f"model: buffer {name} changes in training and is registered with "
                "persistent=False, so that a resumed run would have lost it; register it without"
            )


def _check_alike(model: nn.Module, ranks: Ranks) -> None:
    """Check that all ranks would save the same (a collective). Raises SharedError."""
    found = ranks.gather({name: _digest(buffer) for name, buffer in persistent(model).items()})
    names = set().union(*found)
    apart = sorted(name for name in names if len({rank.get(name) for rank in found}) > 1)
    if apart:
        more = f" and {len(apart) - 1} more" if len(apart) > 1 else ""
        raise SharedError(
            f"model: buffer {apart[0]}{more}: changes in training to other numbers on each of "
            f"{ranks.world_size} ranks; sum over the ranks in forward what it is computed from "
            "(torch.distributed.all_reduce), or train on one rank"
        )


@torch.no_grad()
def _put_back(model: nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    for name, buffer in before.items():
        parent, _, key = name.rpartition(".")
        held = model.get_submodule(parent)._buffers
        if held.get(key) is not None and _form(held[key]) == _form(buffer):
            held[key].copy_(buffer)
        else:
            held[key] = buffer


def to_save(model: nn.Module, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Copy the persistent buffers to the CPU of the first rank; others get none (a collective).

    Raises:
        SharedError: the ranks have different ones, of which a checkpoint could hold one only.
    """
    _check_alike(model, ranks)
    if not ranks.is_first:
        return {}
    found = {name: b.detach().to("cpu", copy=True) for name, b in persistent(model).items()}
    # safetensors writes contiguous ones alone, and forward may have put others in their place.
    return {name: buffer.contiguous() for name, buffer in found.items()}


def _form(buffer: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return buffer.shape, buffer.dtype


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as bytes, which every backend sends, NaN and booleans too."""
    return buffer.detach().view(-1).view(torch.uint8)


def _digest(buffer: torch.Tensor) -> str:
    digest = xxhash.xxh3_128(repr(_form(buffer)).encode())
    if buffer.numel() > 0:
        digest.update(_bytes(buffer.contiguous()).cpu().numpy())
    return digest.hexdigest()
