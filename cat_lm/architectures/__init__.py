"""Families of models: the one registry of them, by the value of `model.architecture`.

Whatever depends on a family (the YAML's keys, classes, FLOPs, memory, words) asks its
`Architecture` here. A family is one file in `families/`, with an ENTRY; a family of an installed
package (`cat_lm.core.plugins`) or of a script is given to `register`. This module imports neither
torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cat_lm.architectures.base import Architecture, Classes, ModelSection
from cat_lm.core.errors import UserError
from cat_lm.core.plugins import is_own
from cat_lm.core.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["ARCHITECTURES", "DEFAULT", "Architecture", "Classes", "ModelSection"]
__all__ += ["find", "get", "names", "of_config", "register"]

DEFAULT = "gpt_neox"  # where no architecture is named


def _check(architecture: Architecture) -> None:
    """Check what a family says of itself. Raises ValueError."""
    named = f"architecture {architecture.name!r}"
    if not issubclass(getattr(architecture, "Section", object), ModelSection):
        raise ValueError(f"{named}: Section must be a ModelSection")
    # Those of this project are imported one by one, and its tests compare them.
    others = () if is_own(architecture) else map(get, names())
    taken = {kind for other in others for kind in other.model_types}
    for kind in architecture.model_types:
        if kind in taken:
            raise ValueError(f"{named}: model type {kind!r} is taken")
    default = architecture.Section.model_fields["architecture"].default
    if default != architecture.name:
        raise ValueError(
            f"{named}: its Section's key architecture has the default {default!r}; must be its name"
        )


ARCHITECTURES: Registry[Architecture] = Registry(
    "architecture",
    Architecture,
    package=f"{__name__}.families",
    words=("name", "title", "model_type", "embedding", "layer_weight"),
    methods=("classes",),
    check=_check,
    first=(DEFAULT, "llama"),
)
get, names, register = ARCHITECTURES.get, ARCHITECTURES.names, ARCHITECTURES.register


def find(config: PreTrainedConfig | Mapping[str, Any]) -> Architecture | None:
    """Look up the family of a model's configuration, or of what its config.json holds.

    A family's own type and that of the library's models which it reads both belong to it; None for
    a model that no family knows, which may be evaluated all the same.
    """
    kind = config.get("model_type") if isinstance(config, Mapping) else config.model_type
    return next((a for a in map(get, names()) if kind in a.model_types), None)


def of_config(config: PreTrainedConfig | Mapping[str, Any]) -> Architecture:
    """Look up the family as `find`.

    Raises:
        UserError: no family has this model type, with those that there are.
    """
    found = find(config)
    if found is None:
        kind = config.get("model_type") if isinstance(config, Mapping) else config.model_type
        known = [name for family in map(get, names()) for name in family.model_types]
        raise UserError(f"model_type is {kind!r}; known: {', '.join(known)}")
    return found


def built_in() -> tuple[Architecture, ...]:
    """List this project's own families, without asking plugins."""
    return tuple(map(get, ARCHITECTURES.own_names()))
