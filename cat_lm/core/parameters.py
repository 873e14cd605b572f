"""What a module says of its parameters: how they start, and which take no weight decay.

Its buffers are persistent, so that checkpoints and exports have them.

`no_decay` is a tuple of names, of the module's own parameters.

`initial_values()` gives starts by name, those of the module's parts too (`gate.bias`), whether or
not it has a parameter of its own. Parts are asked before what holds them, which therefore decides.
Of a mixer, a module with `keeps_initialisation` true is left as it built itself, and so are its
parts; what `initial_values` gives comes after that as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

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

    A name of a parameter that there could be and is not (None, as `nn.Linear` has a bias) may be
    in `no_decay`.

    Raises:
        ValueError: the module does not say it, or names what is no parameter of its own; a filter
            or a rate would shrink without a word.
    """
    own, kind = dict(module.named_parameters(recurse=False)), type(module).__name__
    if hasattr(module, "no_decay"):
        exempt = module.no_decay
        _check_names(f"{kind}.no_decay", exempt, module._parameters)
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


def _check_names(named: str, names: object, known: Mapping[str, nn.Parameter | None]) -> None:
    """Check that names are a tuple of known ones. Raises ValueError."""
    if not isinstance(names, tuple | list):
        such = f", as ({names!r},)" if isinstance(names, str) else ""
        raise ValueError(f"{named}={names!r}: must be a tuple of names{such}")
    if unknown := [name for name in names if name not in known]:
        own = ", ".join(name for name, parameter in known.items() if parameter is not None)
        raise ValueError(
            f"{named} names {unknown[0]!r}; must be of its own parameters: {own or 'it has none'}"
        )


def check_parameters(module: nn.Module, gives_all_starts: bool = False) -> None:
    """Check what a module and its parts say of their parameters, before a model is made of it.

    Args:
        gives_all_starts: whether all start as `initial_values` say, but for those of layers that
            draw their own, as torch's do; then none is left as it was built.

    Raises:
        ValueError: one says nothing, or names what it has not, or has a buffer that is not saved.
    """
    for part in module.modules():
        takes_decay(part)
        _check_buffers(part)
    if any(parameter.is_meta for parameter in module.parameters()):
        return  # no start is needed, and what it is computed from is not there
    with torch.random.fork_rng(devices=[]):  # a model's draws are those without this look
        named = [(part, name) for part in module.modules() for name in initial_values(part)]
    if gives_all_starts:
        _check_starts(module, {id(part.get_parameter(name)) for part, name in named})


def _check_buffers(part: nn.Module) -> None:
    """Check that a module's buffers are saved, as nothing makes others again. Raises ValueError.

    transformers builds a model that it loads without memory, and leaves in such a buffer whatever
    lies where it is put.
    """
    if hasattr(part, "original_inv_freq"):
        return  # transformers' rotary embeddings, which it does make again
    own = part.named_buffers(recurse=False, remove_duplicate=False)
    lost = [name for name, _ in own if name in part._non_persistent_buffers_set]
    if lost:
        raise ValueError(
            f"{type(part).__name__} registers the buffer {lost[0]} with persistent=False, so that "
            "a loaded model would not have its numbers; register it without, or compute it in "
            "forward"
        )


def _check_starts(module: nn.Module, given: set[int]) -> None:
    """Check that parameters start as said, by the `id` of those. Raises ValueError."""
    for part in module.modules():
        kind, own = type(part).__name__, dict(part.named_parameters(recurse=False))
        if getattr(part, "keeps_initialisation", False):
            raise ValueError(
                f"{kind}.keeps_initialisation: is for mixers; name how its parameters start in "
                "initial_values"
            )
        lacking = [name for name, parameter in own.items() if id(parameter) not in given]
        if lacking and not hasattr(part, "reset_parameters"):
            raise ValueError(
                f"nothing says how {', '.join(lacking)} of {kind} must start; give it a method "
                "initial_values that returns a dict of a tensor for each name"
            )


def initial_values(module: nn.Module) -> dict[str, Tensor]:
    """Return how the parameters start that a module names, of itself and its parts; or {}.

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
