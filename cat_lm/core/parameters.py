"""What a module declares about its parameters: initial values, and which take no weight decay.

`no_decay` is a tuple of names of the module's own parameters.

`initial_values()` returns a dict of tensors by parameter name, also of the module's submodules
(`gate.bias`). Submodules are initialized before the modules that hold them, which therefore decide.
In a mixer, a module with `keeps_initialisation = True` and its submodules keep the values that its
constructor drew; `initial_values` is applied after that.

Buffers must be persistent, so that checkpoints and exports have them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cat_lm.core.errors import UserError

# Weights of these layers take weight decay, and biases do not.
_MATRICES = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


class NothingDecays(nn.Module):
    """A base class for modules whose own parameters, whichever they are, take no weight decay."""

    @property
    def no_decay(self) -> tuple[str, ...]:
        """Return the names of all parameters of the module itself."""
        return tuple(self._parameters)


def decay_by_name(module: nn.Module) -> dict[str, bool]:
    """Return True for each parameter of the module itself, by name, that takes weight decay.

    `no_decay` may name a parameter that is None, such as a missing bias. Raises ValueError where
    the module declares nothing or names a parameter that it does not have: a filter or a decay rate
    would shrink unnoticed.
    """
    own, kind = dict(module.named_parameters(recurse=False)), type(module).__name__
    if hasattr(module, "no_decay"):
        exempt = module.no_decay
        if not isinstance(exempt, tuple | list) or set(exempt) - module._parameters.keys():
            raise ValueError(
                f"{kind}.no_decay={exempt!r}: must be a tuple of names of its own parameters "
                f"({', '.join(own)})"
            )
    elif isinstance(module, _MATRICES):
        exempt = ("bias",)
    elif own and not isinstance(module, _NORMS):
        raise ValueError(
            f"{kind} has parameters ({', '.join(own)}) and does not say which of them take no "
            "weight decay; give the class (or the layer, if the class is a library's) "
            "no_decay = (…), a tuple of their names"
        )
    else:
        exempt = tuple(own)
    return {name: name not in exempt for name in own}


def parameters_by_decay(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split a model's parameters, each once, into those that take weight decay and the others.

    Every module with parameters of its own that is no linear layer, embedding or norm must have
    `no_decay`, a tuple of the names of its parameters without weight decay.

    Raises:
        UserError: a module has no `no_decay`, or it names another module's parameters.
    """
    decayed: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    seen: set[int] = set()
    for place, module in model.named_modules():
        try:
            decays = decay_by_name(module)
        except ValueError as error:
            raise UserError(f"model: {place or 'itself'}: {error}") from None
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                (decayed if decays[name] else exempt).append(parameter)
    return decayed, exempt


def check_parameters(module: nn.Module, needs_initial_values: bool = False) -> None:
    """Check what a module and its submodules declare about their parameters and buffers.

    transformers loads a model into modules on the meta device: a buffer that is not saved, or a
    parameter without an initial value, would hold uninitialized memory.

    Args:
        needs_initial_values: require that `initial_values` has every parameter, except those of
            modules that initialize themselves by `reset_parameters`, as torch's layers do.

    Raises:
        ValueError: a declaration is missing or wrong, or a buffer is not persistent.
    """
    for part in module.modules():
        decay_by_name(part)
        buffers = {name for name, buffer in part._buffers.items() if buffer is not None}
        lost = part._non_persistent_buffers_set & buffers
        # transformers computes the buffers of its own rotary embeddings again.
        if lost and not hasattr(part, "original_inv_freq"):
            raise ValueError(
                f"{type(part).__name__} registers the buffer {min(lost)} with persistent=False, so "
                "that a loaded model would not have its numbers; register it without, or compute "
                "it in forward"
            )
    if any(parameter.is_meta for parameter in module.parameters()):
        return  # Tensors on the meta device have no values to compute initial values from.
    with torch.random.fork_rng(devices=[]):  # The check must not change the model's random draws.
        named = [(part, name) for part in module.modules() for name in initial_values(part)]
    given = {id(part.get_parameter(name)) for part, name in named}
    for part in module.modules() if needs_initial_values else ():
        own = part.named_parameters(recurse=False)
        lacking = [name for name, parameter in own if id(parameter) not in given]
        if lacking and not hasattr(part, "reset_parameters"):
            raise ValueError(
                f"nothing says how {', '.join(lacking)} of {type(part).__name__} must start; give "
                "it a method initial_values that returns a dict of a tensor for each name"
            )


def initial_values(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's `initial_values()`, {} if it has no such method.

    Raises ValueError for a name that is no parameter, and for a tensor of another shape.
    """
    values = dict(module.initial_values()) if hasattr(module, "initial_values") else {}
    known = dict(module.named_parameters(remove_duplicate=False)) if values else {}
    named = f"{type(module).__name__}.initial_values"
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"{named} names {name!r}, which is none of {', '.join(known)}")
        if not isinstance(value, Tensor) or value.shape != known[name].shape:
            found = list(value.shape) if isinstance(value, Tensor) else repr(value)
            wanted = list(known[name].shape)
            raise ValueError(f"{named} gives {name} as {found}: must be a tensor of {wanted}")
    return values


@torch.no_grad()
def apply_initial_values(
    module: nn.Module, copy: Callable[[Tensor, Tensor], object] = Tensor.copy_
) -> None:
    """Set the parameters that `initial_values` names, by `copy(parameter, value)`."""
    for name, value in initial_values(module).items():
        copy(module.get_parameter(name), value)


def self_initialised_modules(module: nn.Module) -> set[nn.Module]:
    """Return the submodules (or the module itself) that keep the values of their constructors."""
    keepers = (m for m in module.modules() if getattr(m, "keeps_initialisation", False))
    return {part for keeper in keepers for part in keeper.modules()}
