"""Check on a small module that a plugin's code reads no later tokens, before a model uses it.

A model that reads later tokens trains without an error, and to a loss that is too low. Everything
else that a registered class promises is checked by its author with `cat_lm.testing.check_entry`.
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
from cat_lm.core.registry import describe_plugin_error

# The check computes ROWS sequences of TIME tokens, and again their first CUT tokens alone.
ROWS, TIME, CUT = 2, 7, 4
# The rounding error allowed, relative to the largest output: a module may compute in bf16.
_TOLERANCE = 2e-2

_IN_CHECK: ContextVar[bool] = ContextVar("in_check", default=False)
_CHECKED: set[Hashable] = set()


def check_causal(
    named: str, key: Hashable, make: Callable[[], tuple[nn.Module, Callable[..., Tensor], int]]
) -> None:
    """Check once per key that a module's outputs do not depend on later tokens.

    Args:
        named: the module's name in error messages.
        key: identifies the module and its options; a key that has passed is not checked again.
        make: returns the module, the function that computes its output, and its width C.

    Raises:
        UserError: the module reads later tokens, or cannot compute them at all.
    """
    if key in _CHECKED or is_in_check():
        return
    try:
        with isolated_check():
            module, compute, width = make()
            perturb_parameters(module)
            x = torch.randn(ROWS, TIME, width)
            y, beginning = compute(x), compute(x[:, :CUT])
    except UserError:
        raise
    except Exception as error:  # A plugin's module may raise anything.
        raise UserError(
            f"{named}: cannot compute {TIME} tokens: {describe_plugin_error(error)}"
        ) from error
    # Outputs that are not finite are no concern here: they end a run by themselves.
    if y.isfinite().all() and not is_same(beginning, y[:, :CUT]):
        raise UserError(f"{named}: its module reads later tokens")
    _CHECKED.add(key)


def copy_with(config: Any, values: dict[str, Any]) -> Any:
    """Return a copy of a configuration with other values of those attributes that it has."""
    other = copy.deepcopy(config)
    for name, value in values.items():
        if hasattr(config, name):
            setattr(other, name, value)
    return other


@contextmanager
def isolated_check() -> Iterator[None]:
    """Build modules in fp32 on the CPU with drawn weights inside of the block.

    The settings of a model that is being built around it (device, dtype, no weights) do not apply.
    """
    from transformers.initialization import TORCH_INIT_FUNCTIONS

    token, dtype = _IN_CHECK.set(True), torch.get_default_dtype()
    drawing = mock.patch.multiple(nn.init, **TORCH_INIT_FUNCTIONS)  # undoes `no_init_weights`
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad(), drawing:
            # torch.manual_seed would seed the devices' generators too.
            torch.default_generator.manual_seed(0)
            torch.set_default_dtype(torch.float32)
            yield
    finally:
        torch.set_default_dtype(dtype)
        _IN_CHECK.reset(token)


def is_in_check() -> bool:
    """Return True inside of `isolated_check`."""
    return _IN_CHECK.get()


def perturb_parameters(module: nn.Module) -> None:
    """Add small noise to the parameters, since those that are 0 could hide a wrong module."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            noise = 0.1 * torch.randn(parameter.shape)
            # Keep the signs: a decay rate may have to stay positive.
            parameter.add_(torch.where(parameter == 0, noise.abs(), parameter * noise))


def is_same(found: Tensor, wanted: Tensor) -> bool:
    """Return True if two results are equal, infinities too, up to rounding."""
    largest = wanted.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    return torch.allclose(found.to(wanted.dtype), wanted, rtol=0.0, atol=_TOLERANCE * largest)
