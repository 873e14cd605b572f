"""How an entry of a registry is tried before a model has it: once, in a small module of its own.

A mistake in what mixes tokens is silent: a model that reads later tokens trains, and better than it
should. Entries of this project are not tried, as their tests compare them with their definitions
(and have them pass the same probes): it would cost every start time and find nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from unittest import mock

import torch
from torch import Tensor, nn

# Rows and tokens of what is read, and how many of the tokens are a beginning, or a document.
ROWS, TIME, CUT = 2, 7, 4
# Of the largest number: what a module may round by that computes in bf16, whatever it is given.
_TOLERANCE = 2e-2

_APART: ContextVar[bool] = ContextVar("apart", default=False)


class Wrong(Exception):
    """Raised by a probe: what is wrong, after the name of what is tried."""


@contextmanager
def apart() -> Iterator[None]:
    """Inside, modules get values, in fp32 on the CPU, whatever is said about those of the model.

    The model may be on the meta device, in bf16, not drawn, or of a rank that is sent its weights.
    Its generator stays where it is.
    """
    token, dtype = _APART.set(True), torch.get_default_dtype()
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad(), _drawing():
            # Of the CPU alone: torch.manual_seed would seed the devices' too.
            torch.default_generator.manual_seed(0)
            torch.set_default_dtype(torch.float32)
            yield
    finally:
        torch.set_default_dtype(dtype)
        _APART.reset(token)


def is_apart() -> bool:
    """Tell whether a module that is being made is one of a probe."""
    return _APART.get()


def _drawing() -> AbstractContextManager:
    """Give torch's own functions back that transformers' `no_init_weights` takes away."""
    transformers = sys.modules.get("transformers.initialization")
    own = getattr(transformers, "TORCH_INIT_FUNCTIONS", None)
    return nullcontext() if own is None else mock.patch.multiple(nn.init, **own)


def stir(module: nn.Module) -> None:
    """Move parameters a little: where they start from 0, what is wrong may give what is right."""
    for parameter in module.parameters():
        if not (parameter.requires_grad and parameter.is_floating_point()):
            continue
        noise = 0.1 * torch.randn(parameter.shape)
        # A sign stays: what is a rate may be no number below 0.
        parameter.add_(torch.where(parameter == 0, noise.abs(), parameter * noise))


def check_same(found: Tensor, wanted: Tensor, otherwise: str) -> None:
    """Check that two results are equal, up to rounding. Raises Wrong with `otherwise`."""
    # What is equal may be infinite: a bias that masks.
    apart = torch.where(found == wanted, 0.0, found - wanted).abs().max()
    largest = wanted[wanted.isfinite()].abs().amax() if wanted.isfinite().any() else 0.0
    if not apart <= _TOLERANCE * largest:
        raise Wrong(otherwise)


def check_output(found: object, shape: tuple[int, ...], of: str) -> None:
    """Check what a module gives: a tensor of numbers, of this shape. Raises Wrong."""
    if not isinstance(found, Tensor):
        raise Wrong(f"gives a {type(found).__name__}; must give a tensor {of}")
    if found.shape != shape:
        raise Wrong(f"gives {list(found.shape)}; must give {of}, here {list(shape)}")
    if not found.isfinite().all():
        raise Wrong("gives numbers that are not finite")


def documents() -> Tensor:
    """Number the documents of rows that are packed, [B, T]."""
    return (torch.arange(TIME) >= CUT).long().expand(ROWS, -1)


def padded() -> Tensor:
    """Tell the real tokens of rows of which one begins and one ends in padding, [B, T] bool."""
    real = torch.ones(ROWS, TIME, dtype=torch.bool)
    real[0, : TIME - CUT - 1] = real[1, CUT + 1 :] = False
    return real
