"""What a module says of its parameters: how they start, and which take no weight decay.

Its buffers are persistent, so that checkpoints and exports have them.

`no_decay` is a tuple of names, of the module's own parameters.

`initial_values()` gives starts by name, those of the module's parts too (`gate.bias`), whether or
not it has a parameter of its own. Parts are asked before what holds them, which therefore decides.
Of a mixer, a module with `keeps_initialisation` true is left as it built itself, and so are its
parts; what `initial_values` gives comes after that as well.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cat_lm.core.errors import UserError

# Of these the weight decays and the bias does not.
_MATRICES = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


class NothingDecays(nn.Module):
    """A module none of whose own parameters, which may be others with other options, decays."""

    @property
    def no_decay(self) -> tuple[str, ...]:
        """Name them."""
        return tuple(self._parameters)


def takes_decay(module: nn.Module) -> dict[str, bool]:
    """Return for each parameter of a module itself, by name, whether it takes weight decay.

    `no_decay` may name one that is None, as a bias. Raises ValueError where the module does not say
    it, or names what is no parameter of its own: a filter or a rate would shrink without a word.
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


def check_parameters(module: nn.Module, gives_all_starts: bool = False) -> None:
    """Check what a module and its parts say of their parameters, before a model is made of it.

    transformers builds a model that it loads without memory; a buffer that is not saved, or a
    parameter without a start, would hold whatever lies where it is put.

    Args:
        gives_all_starts: whether all start as `initial_values` say, but for those of layers that
            draw their own, as torch's do.

    Raises:
        ValueError: one says nothing, or names what it has not, or has a buffer that is not saved.
    """
    for part in module.modules():
        takes_decay(part)
        buffers = {name for name, buffer in part._buffers.items() if buffer is not None}
        lost = part._non_persistent_buffers_set & buffers
        # transformers makes the buffers of its own rotary embeddings again.
        if lost and not hasattr(part, "original_inv_freq"):
            raise ValueError(
                f"{type(part).__name__} registers the buffer {min(lost)} with persistent=False, so "
                "that a loaded model would not have its numbers; register it without, or compute "
                "it in forward"
            )
    if any(parameter.is_meta for parameter in module.parameters()):
        return  # no start is needed, and what it is computed from is not there
    with torch.random.fork_rng(devices=[]):  # a model's draws are those without this look
        named = [(part, name) for part in module.modules() for name in initial_values(part)]
    given = {id(part.get_parameter(name)) for part, name in named}
    for part in module.modules() if gives_all_starts else ():
        own = part.named_parameters(recurse=False)
        lacking = [name for name, parameter in own if id(parameter) not in given]
        if lacking and not hasattr(part, "reset_parameters"):
            raise ValueError(
                f"nothing says how {', '.join(lacking)} of {type(part).__name__} must start; give "
                "it a method initial_values that returns a dict of a tensor for each name"
            )


def initial_values(module: nn.Module) -> dict[str, Tensor]:
    """Return how the parameters start that a module names, of itself and its parts; or {}.

    Raises ValueError where it names something else, or gives another shape.
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
def start(module: nn.Module, copy: Callable[[Tensor, Tensor], object] = Tensor.copy_) -> None:
    """Start what `initial_values` names from there, by `copy`; the parts have started before."""
    for name, value in initial_values(module).items():
        copy(module.get_parameter(name), value)


def kept_parts(module: nn.Module) -> set[nn.Module]:
    """List which of a module's parts, itself among them, are left as they built themselves."""
    keepers = (m for m in module.modules() if getattr(m, "keeps_initialisation", False))
    return {part for keeper in keepers for part in keeper.modules()}
