"""What a module says of its parameters: how they start.

`initial_values()` gives starts by name, those of the module's parts too (`gate.bias`), whether or
not it has a parameter of its own. Parts are asked before what holds them, which therefore decides.
Of a mixer, a module with `keeps_initialisation` true is left as it built itself, and so are its
parts; what `initial_values` gives comes after that as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


def initial_values(module: nn.Module) -> dict[str, Tensor]:
    """Give how those parameters of a module and its parts start that it names; {} if it names none.

    Raises:
        ValueError: it names something else, or a start has another shape than its parameter.
    """
    if not hasattr(module, "initial_values"):
        return {}
    named, values = f"{type(module).__name__}.initial_values", module.initial_values()
    if not isinstance(values, Mapping):
        raise ValueError(f"{named} gives {values!r}: must be a dict of tensors by parameter name")
    known = dict(module.named_parameters(remove_duplicate=False))
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"{named} names {name!r}, which is none of {', '.join(known)}")
        if not isinstance(value, Tensor) or value.shape != known[name].shape:
            found = list(value.shape) if isinstance(value, Tensor) else repr(value)
            wanted = list(known[name].shape)
            raise ValueError(f"{named} gives {name} as {found}: must be a tensor of {wanted}")
    return dict(values)


@torch.no_grad()
def start(module: nn.Module, copy: Callable[[Tensor, Tensor], object] = Tensor.copy_) -> None:
    """Start what a module names in `initial_values` from there; its parts have started before.

    Args:
        copy: takes a parameter and its start.

    Raises:
        ValueError: as of `initial_values`.
    """
    for name, value in initial_values(module).items():
        copy(module.get_parameter(name), value)


def kept_parts(module: nn.Module) -> set[nn.Module]:
    """List which of a module's parts, itself among them, are left as they built themselves."""
    keepers = (m for m in module.modules() if getattr(m, "keeps_initialisation", False))
    return {part for keeper in keepers for part in keeper.modules()}
