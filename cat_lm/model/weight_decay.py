"""Which parameters take weight decay: every module says it of its own."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

# Of these the weight decays and the bias does not.
_MATRICES = (nn.Linear, nn.Embedding)
_NORMS = (nn.LayerNorm, nn.RMSNorm)


def parameters_by_decay(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split a model's parameters, each once, into those that take weight decay and the others.

    A module with parameters of its own that is no linear layer, embedding or norm names those that
    take none in its class's `no_decay`, a tuple of parameter names.

    Raises:
        TypeError: a module does not say it; a filter or a rate would shrink without a word.
    """
    decayed: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    seen: set[int] = set()
    for module in model.modules():
        for parameter, decays in _own(module):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                (decayed if decays else exempt).append(parameter)
    return decayed, exempt


def _own(module: nn.Module) -> Iterator[tuple[nn.Parameter, bool]]:
    own = dict(module.named_parameters(recurse=False))
    if not own:
        return
    kind = type(module)
    if isinstance(module, _MATRICES):
        no_decay: tuple[str, ...] = ("bias",)
    elif isinstance(module, _NORMS):
        no_decay = tuple(own)
    elif hasattr(kind, "no_decay"):
        no_decay = kind.no_decay
    else:
        raise TypeError(
            f"{kind.__name__} has parameters ({', '.join(own)}) and does not say which of them "
            "take no weight decay; give the class no_decay = (…), a tuple of their names"
        )
    for name, parameter in own.items():
        yield parameter, name not in no_decay
