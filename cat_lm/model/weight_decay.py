"""Which parameters take weight decay: every module says it of its own."""

from __future__ import annotations

from torch import nn

from cat_lm.core.errors import UserError
from cat_lm.core.parameters import takes_decay


def parameters_by_decay(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split a model's parameters, each once, into those that take weight decay and the others.

    A module with parameters of its own that is no linear layer, embedding or norm names those that
    take none in its class's `no_decay`, a tuple of parameter names.

    Raises:
        UserError: a module does not say it, or names what it has not; naming its place.
    """
    decayed: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    seen: set[int] = set()
    for place, module in model.named_modules():
        try:
            decays = takes_decay(module)
        except ValueError as error:
            raise UserError(f"model: {place or 'itself'}: {error}") from None
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                (decayed if decays[name] else exempt).append(parameter)
    return decayed, exempt
