"""Registers the project's operators with torch, so that a missing derivative raises.

`torch.library.custom_op` alone drops tangents: forward-mode derivatives through it are zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._library.autograd import make_autograd_impl
from torch.autograd import forward_ad

_DEVICES = ("CPU", "CUDA", "MPS", "XPU")


def custom_op(
    name: str, schema: str | None = None
) -> Callable[[Callable[..., Any]], torch.library.CustomOpDef]:
    """Return the decorator that makes an operator of torch that changes no argument.

    A backward pass is registered as with `torch.library.custom_op`; without one, gradients through
    the operator raise RuntimeError. Forward-mode differentiation raises NotImplementedError.

    Args:
        schema: arguments and results, of a function without annotations.
    """

    def define(function: Callable[..., Any]) -> torch.library.CustomOpDef:
        operator = torch.library.custom_op(name, function, mutates_args=(), schema=schema)
        with_gradients = make_autograd_impl(operator._opoverload, operator)

        def implement(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            if has_tangent(*args, *kwargs.values()):
                raise NotImplementedError(
                    f"{name} has no forward-mode derivative; differentiate backward, with "
                    "torch.autograd.grad"
                )
            return with_gradients(keyset, *args, **kwargs)

        # These keys go before torch's own registration, for all devices, which sees tangents of
        # tensors alone that require a gradient.
        for device in _DEVICES:
            key = f"Autograd{device}"
            operator._lib.impl(operator._name, implement, key, with_keyset=True)
        return operator

    return define


def has_tangent(*values: Any) -> bool:
    """Return True if a tensor among the values carries a forward-mode derivative."""
    if forward_ad._current_level < 0:
        return False
    tensors = (x for x in values if isinstance(x, Tensor))
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def is_differentiated(*tensors: Tensor) -> bool:
    """Return True if a derivative of what is computed from the tensors may be asked for."""
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return learns or has_tangent(*tensors)


def refuse_second_derivative(name: str, advice: str = "") -> None:
    """Raise in a backward pass that is to be differentiated itself, with `create_graph=True`.

    For gradients that kernels compute outside of autograd: they have no graph, so that a second
    derivative would be the wrong number or zero, and no error.
    """
    if torch.is_grad_enabled():
        end = f"; {advice}" if advice else ""
        raise NotImplementedError(f"{name} has no second derivative (create_graph=True){end}")


def fold_vmap_axis(size: int, tensor: Tensor | None, axis: int | None, into: int) -> Tensor | None:
    """Join the axis of torch.vmap, which has S models, with axis `into`, the models outside."""
    if tensor is None:
        return None
    if axis is None:
        tensor = tensor.unsqueeze(into).expand(*tensor.shape[:into], size, *tensor.shape[into:])
    else:
        tensor = tensor.movedim(axis, into)
    return tensor.flatten(into, into + 1)


def run_sequentially(
    operator: Any, info: Any, axes: tuple[Any, ...], *given: Any
) -> tuple[Any, Any]:
    """Run an operator once for each model of torch.vmap: its results and their axes."""
    pairs = list(zip(given, axes, strict=True))
    found = [
        operator(*(x.select(axis, i) if isinstance(axis, int) else x for x, axis in pairs))
        for i in range(info.batch_size)
    ]
    if isinstance(found[0], Tensor):
        return torch.stack(found), 0
    return tuple(torch.stack(parts) for parts in zip(*found, strict=True)), (0,) * len(found[0])


def register_in_turn(*operators: torch.library.CustomOpDef) -> None:
    """Make torch.vmap run these operators once for each model."""
    for operator in operators:
        operator.register_vmap(functools.partial(run_sequentially, operator))
