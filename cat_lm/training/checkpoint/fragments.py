"""The elements of parameters that this rank's optimizer holds, at any ZeRO stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

if TYPE_CHECKING:
    from cat_lm.config import RunConfig
    from cat_lm.training.distributed import Ranks


class Trained(Protocol):
    """A model with its optimizer, as the `Engine` has them."""

    model: nn.Module
    optimizer: Any
    deepspeed: Any
    config: RunConfig
    ranks: Ranks


@dataclass(frozen=True)
class Fragment:
    """Elements [start, stop) of a flattened parameter, and where this rank's optimizer has them."""

    name: str
    start: int
    stop: int
    stepped: torch.Tensor  # the fp32 tensor that the optimizer steps: masters of many parameters
    offset: int  # of element `start` in it

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This fragment's elements of `stepped` or of a moment of it, as a flat view."""
        return tensor.detach().view(-1)[self.offset : self.offset + self.stop - self.start]

    def part(self, start: int, stop: int) -> Fragment:
        """The elements that are also in [start, stop); may be none."""
        start = max(start, self.start)
        stop = max(start, min(stop, self.stop))
        return Fragment(self.name, start, stop, self.stepped, self.offset + start - self.start)


def shapes(engine: Trained) -> dict[str, torch.Size]:
    """The whole parameters' shapes by name; ZeRO-3 leaves an empty tensor in their place."""
    named = engine.model.named_parameters()
    return {name: getattr(parameter, "ds_shape", parameter.shape) for name, parameter in named}


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that belong to the model's state, which is saved.

    Models of this project have none; a plugin's may: drawn features, a codebook, statistics. One
    that changes in training must change alike on all ranks, which sums over them do.
    """
    saved = model.state_dict().keys()
    named = model.named_buffers(remove_duplicate=False)
    return {name: buffer for name, buffer in named if name in saved}


def fragments(engine: Trained) -> list[Fragment]:
    """Return the fragments of this rank's optimizer, in the order of the model's parameters."""
    stage = engine.config.train.zero_stage
    find = _whole if stage == 0 else _partition if stage == 3 else _linked
    found = (find(engine, name, p) for name, p in engine.model.named_parameters())
    return [fragment for fragment in found if fragment and fragment.start < fragment.stop]


def _whole(engine: Trained, name: str, parameter: torch.nn.Parameter) -> Fragment:
    return Fragment(name, 0, parameter.numel(), parameter, 0)


def _linked(engine: Trained, name: str, parameter: torch.nn.Parameter) -> Fragment | None:
    """ZeRO-1 and 2: DeepSpeed links a parameter to its piece of this rank's flat masters."""
    link = parameter._hp_mapping
    if link is None:
        return None  # wholly on other ranks
    (stepped,) = engine.optimizer.param_groups[link.param_group_index]["params"]
    address = link.lp_fragment_address
    stop = address.start + address.numel
    return Fragment(name, address.start, stop, stepped, link.hp_fragment_address.start)


def _partition(engine: Trained, name: str, parameter: torch.nn.Parameter) -> Fragment:
    """ZeRO-3: every parameter is cut into equal partitions, the last of them padded."""
    optimizer = engine.optimizer
    group, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = min(engine.ranks.rank * size, parameter.ds_numel)
    stop = min(start + size, parameter.ds_numel)
    return Fragment(name, start, stop, optimizer.fp32_partitioned_groups_flat[group], offset)


def stepped_tensors(engine: Trained) -> list[torch.Tensor]:
    """The tensors that the optimizer has states of; between steps ZeRO-3 hides them from it."""
    if engine.config.train.zero_stage == 3:
        return engine.optimizer.fp32_partitioned_groups_flat
    return [tensor for group in engine.optimizer.param_groups for tensor in group["params"]]


def share(engine: Trained) -> list[Fragment]:
    """The fragments that this rank writes, so that every element is written once."""
    held, ranks = fragments(engine), engine.ranks
    if engine.config.train.zero_stage > 0:
        return held
    total = sum(fragment.stop for fragment in held)
    first, end = (total * r // ranks.world_size for r in (ranks.rank, ranks.rank + 1))
    parts, position = [], 0
    for fragment in held:
        parts.append(fragment.part(first - position, end - position))
        position += fragment.stop
    return [part for part in parts if part.start < part.stop]
