"""Check that what a plugin adds reads no later tokens, in a small module, before a model has it.

A model that reads later tokens trains, and better than it should: no other error would name it.
What else an entry promises, its author checks with `cat_lm.testing.check_entry`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from cat_lm.core.errors import UserError
from cat_lm.core.registry import mishap

# Rows and tokens of what is read, and how many of the tokens are its beginning.
ROWS, TIME, CUT = 2, 7, 4
# Of the largest number: what a module may round by that computes in bf16, whatever it is given.
_TOLERANCE = 2e-2

_APART: ContextVar[bool] = ContextVar("apart", default=False)
_CHECKED: set[Hashable] = set()


def check_causal(
    named: str, key: Hashable, make: Callable[[], tuple[nn.Module, Callable[..., Tensor], int]]
) -> None:
    """Check what `make` gives, once for each key: a module, what computes with it, and C."""
    if key in _CHECKED or is_apart():
        return
    try:
        with apart():
            module, compute, width = make()
            stir(module)
            x = torch.randn(ROWS, TIME, width)
            y, beginning = compute(x), compute(x[:, :CUT])
    except UserError:
        raise
    except Exception as error:  # whatever a plugin's module raises
        raise UserError(f"{named}: cannot compute {TIME} tokens: {mishap(error)}") from error
    # What is not finite ends a run by itself.
    if y.isfinite().all() and not is_same(beginning, y[:, :CUT]):
        raise UserError(f"{named}: its module reads later tokens")
    _CHECKED.add(key)


def changed(config: Any, values: dict[str, Any]) -> Any:
    """Copy a configuration with other values of what it has."""
    other = copy.deepcopy(config)
    for name, value in values.items():
        if hasattr(config, name):
            setattr(other, name, value)
    return other


@contextmanager
def apart() -> Iterator[None]:
    """Within, modules are made in fp32 on the CPU and drawn, whatever a model is made with."""
    from transformers.initialization import TORCH_INIT_FUNCTIONS

    token, dtype = _APART.set(True), torch.get_default_dtype()
    drawing = mock.patch.multiple(nn.init, **TORCH_INIT_FUNCTIONS)  # for `no_init_weights`
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad(), drawing:
            # Of the CPU alone: torch.manual_seed would seed the devices' too.
            torch.default_generator.manual_seed(0)
            torch.set_default_dtype(torch.float32)
            yield
    finally:
        torch.set_default_dtype(dtype)
        _APART.reset(token)


def is_apart() -> bool:
    """Return True if a module that is being made is one of a check."""
    return _APART.get()


def stir(module: nn.Module) -> None:
    """Move parameters a little: where they start from 0, what is wrong may give what is right."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            noise = 0.1 * torch.randn(parameter.shape)
            # A sign stays: what is a rate may be no number below 0.
            parameter.add_(torch.where(parameter == 0, noise.abs(), parameter * noise))


def is_same(found: Tensor, wanted: Tensor) -> bool:
    """Return True if two results are equal, infinities too, up to rounding."""
    largest = wanted.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    return torch.allclose(found.to(wanted.dtype), wanted, rtol=0.0, atol=_TOLERANCE * largest)
