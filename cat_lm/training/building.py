"""Weights that one rank makes and the others get: a host holds one copy while a run starts.

DeepSpeed gives every rank the first one's parameters when it takes the model over, so what the
others had computed would be thrown away: 4 bytes a parameter and rank of their hosts' memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn

from cat_lm.config import RunConfig
from cat_lm.core.causality import is_apart


@contextmanager
def without_weights() -> Iterator[None]:
    """Inside, the parameters of new modules take no memory (they are on the meta device).

    Buffers are computed as ever, from a generator that may stand elsewhere: the Engine shares them.
    """
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta and not is_apart():
            module._parameters[name] = _with_data(parameter, parameter.data.to("meta"))

    with mock.patch.object(nn.Module, "register_parameter", on_meta):
        yield


def begins_again_in_fp32(config: RunConfig) -> bool:
    """Return True if master weights get what the model came with; precision must be decided.

    Where not all weights learn, no bit of the others may change, and DeepSpeed makes them of the
    model's bf16. In fp32, and without ZeRO, they are the weights themselves.
    """
    train = config.train
    rounds = train.precision == "bf16" and train.zero_stage > 0
    return rounds and not config.objective.trains_all


def give_memory(model: nn.Module, device: torch.device) -> None:
    """Allocate what is on the meta device on `device`, with anything in it.

    That is all parameters, and buffers that were computed from them.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}  # tied ones stay one
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in made:
                data = torch.empty_like(parameter.data, device=device)
                made[parameter] = _with_data(parameter, data)
            module._parameters[name] = made[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def _with_data(parameter: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """Make `parameter` anew, with what its owner has noted on it."""
    other = nn.Parameter(data, requires_grad=parameter.requires_grad)
    other.__dict__.update(parameter.__dict__)
    return other
