"""Families of models: the one registry of them, by the value of `model.architecture`.

Whatever depends on a family (the YAML's keys, classes, FLOPs, memory, words) asks its
`Architecture` here. A family is one file in this folder and its name in `_BUILT_IN`; one of an
installed package (`cat_lm.core.plugins`) or of a script is given to `register`. Imports neither
torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cat_lm.architectures.base import Architecture, Classes, ModelSection
from cat_lm.core import plugins
from cat_lm.core.errors import UserError
from cat_lm.core.registry import check_entry, take_built_in

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["DEFAULT", "Architecture", "Classes", "ModelSection"]
__all__ += ["find", "get", "names", "of_config", "register"]

# Each is a file here that has an ARCHITECTURE, or registers one. The first is meant where none is
# named.
_BUILT_IN = (
    *("gpt_neox", "llama", "mixer", "mamba", "mamba2", "gla", "delta_net", "gated_deltanet"),
)
DEFAULT = _BUILT_IN[0]

_ARCHITECTURES: dict[str, Architecture] = {}


def register(architecture: Architecture) -> None:
    """Add a family.

    Raises:
        ValueError: its name or a model type of it is taken, something is missing, or its section
            is of another name.
    """
    words = ("name", "title", "model_type", "embedding", "layer_weight")
    check_entry(
        *("architecture", architecture, Architecture, words),
        methods=("classes", "mixing_flops", "saved_tensors"),
    )
    if not issubclass(getattr(architecture, "Section", object), ModelSection):
        raise ValueError(f"architecture {architecture.name!r}: Section must be a ModelSection")
    taken = {kind for other in _ARCHITECTURES.values() for kind in other.model_types}
    if architecture.name in _ARCHITECTURES:
        raise ValueError(f"architecture {architecture.name!r}: there is one of this name already")
    for kind in architecture.model_types:
        if kind in taken:
            raise ValueError(f"architecture {architecture.name!r}: model type {kind!r} is taken")
    default = architecture.Section.model_fields["architecture"].default
    if default != architecture.name:
        raise ValueError(
            f"architecture {architecture.name!r}: its Section's key architecture has the default "
            f"{default!r}; must be its name"
        )
    _ARCHITECTURES[architecture.name] = architecture


def names() -> tuple[str, ...]:
    """List the families. Raises UserError where a plugin cannot be imported."""
    plugins.load()
    return tuple(_ARCHITECTURES)


def get(name: str) -> Architecture:
    """Look a family up by the value of `model.architecture`.

    Raises:
        UserError: there is none of that name, with those that there are.
    """
    if name not in names():
        raise UserError(f"architecture {name!r}: unknown; known: {', '.join(names())}")
    return _ARCHITECTURES[name]


def find(config: PreTrainedConfig | Mapping[str, Any]) -> Architecture | None:
    """Look up the family of a model's configuration, or of what its config.json holds.

    A family's own type and that of the library's models which it reads both belong to it; None for
    a model that no family knows, which may be evaluated all the same.
    """
    kind = config.get("model_type") if isinstance(config, Mapping) else config.model_type
    plugins.load()
    return next((a for a in _ARCHITECTURES.values() if kind in a.model_types), None)


def of_config(config: PreTrainedConfig | Mapping[str, Any]) -> Architecture:
    """Look up the family as `find`.

    Raises:
        UserError: no family has this model type, with those that there are.
    """
    found = find(config)
    if found is None:
        kind = config.get("model_type") if isinstance(config, Mapping) else config.model_type
        known = [name for a in _ARCHITECTURES.values() for name in a.model_types]
        raise UserError(f"model_type is {kind!r}; known: {', '.join(known)}")
    return found


def built_in() -> tuple[Architecture, ...]:
    """List this project's own families, without asking plugins."""
    return tuple(_ARCHITECTURES[name] for name in _BUILT_IN)


take_built_in(__name__, _BUILT_IN, "ARCHITECTURE", register, _ARCHITECTURES.__contains__)
