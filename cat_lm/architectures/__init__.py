"""Families of models: the one registry of them, by the value of `model.architecture`.

Whatever depends on a family (the YAML's keys, classes, words, names of parameters) asks its
`Architecture` here. A family is one file in `families/`, with an ENTRY; a family of an installed
package (`cat_lm.core.plugins`) or of a script is given to `register`. This module imports neither
torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cat_lm.architectures.base import NOT_FIELDS, Architecture, Classes, ModelSection, Summary
from cat_lm.core.errors import UserError
from cat_lm.core.plugins import is_own
from cat_lm.core.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["ARCHITECTURES", "DEFAULT", "Architecture", "Classes", "ModelSection", "Summary"]
__all__ += ["check_model", "classes_of", "find", "get", "has_stock", "library_config"]
__all__ += ["model_types", "names", "of_config", "register", "section_of"]

DEFAULT = "gpt_neox"  # The family of a configuration that names none.


def model_types(family: Architecture) -> tuple[str, ...]:
    """List the `model_type` values that a config.json of a family may have: this project's and the
    library's.
    """
    return (family.model_type, *([family.library_type] if family.library_type else []))


def has_stock(family: Architecture) -> bool:
    """Return True if transformers has a model of a family that runs beside ours."""
    return family.library_type is not None and family.library == "transformers"


def _check(family: Architecture) -> None:
    """Check the declared attributes of a family. Raises ValueError."""
    named = f"architecture {family.name!r}"
    if not issubclass(getattr(family, "Section", object), ModelSection):
        raise ValueError(f"{named}: Section must be a ModelSection")
    if not family.class_prefix and type(family).classes is Architecture.classes:
        raise ValueError(f"{named}: its class {type(family).__name__} must define classes")
    # This project's own families are imported one by one, and its tests compare their model types.
    others = () if is_own(family) else map(get, names())
    taken = {kind for other in others for kind in model_types(other)}
    for kind in model_types(family):
        if kind in taken:
            raise ValueError(f"{named}: model type {kind!r} is taken")
    default = family.Section.model_fields["architecture"].default
    if default != family.name:
        raise ValueError(
            f"{named}: its Section's key architecture has the default {default!r}; must be its name"
        )


ARCHITECTURES: Registry[Architecture] = Registry(
    "architecture",
    Architecture,
    package=f"{__name__}.families",
    words=("name", "title", "model_type", "layer_weight"),
    check=_check,
    first=(DEFAULT, "llama"),
)
get, names, register = ARCHITECTURES.get, ARCHITECTURES.names, ARCHITECTURES.register


def find(config: PreTrainedConfig | Mapping[str, Any]) -> Architecture | None:
    """Return the family of a configuration, or of the dictionary of its config.json; None if
    unknown.

    A family's own type and that of the library's models which it reads both belong to it; None for
    a model that no family knows, which may be evaluated all the same.
    """
    kind = config.get("model_type") if isinstance(config, Mapping) else config.model_type
    return next((family for family in map(get, names()) if kind in model_types(family)), None)


def of_config(config: PreTrainedConfig | Mapping[str, Any]) -> Architecture:
    """Return the family of a configuration as `find` does, and raise if there is none.

    Raises:
        UserError: no family has this model type, with those that there are.
    """
    found = find(config)
    if found is None:
        kind = config.get("model_type") if isinstance(config, Mapping) else config.model_type
        known = [name for family in map(get, names()) for name in model_types(family)]
        raise UserError(f"model_type is {kind!r}; known: {', '.join(known)}")
    return found


def built_in() -> tuple[Architecture, ...]:
    """List this project's own families, without asking plugins."""
    return tuple(map(get, ARCHITECTURES.own_names()))


def check_model(family: Architecture, section: Any, model: PreTrainedModel) -> None:
    """Check that a new model is what its family says of it, which `register` cannot see.

    Raises:
        ValueError: naming what differs.
    """
    from cat_lm.model.hf.causal_lm import CausalLanguageModel

    if model.config.model_type != family.model_type:
        raise ValueError(f"its configuration's model_type is {model.config.model_type!r}")
    if not isinstance(model, CausalLanguageModel):
        home = CausalLanguageModel.__module__
        raise ValueError(f"{type(model).__name__} must extend CausalLanguageModel of {home}")
    last = family.layer_weight.format(layer=section.num_hidden_layers - 1)
    if last not in dict(model.named_parameters()):
        raise ValueError(f"layer_weight names {last}, which its model has not")


# The functions below take a loaded configuration, whose family is always known.


def classes_of(config: PreTrainedConfig) -> Classes:
    """Import the classes (configuration, model, language model) of a configuration's family."""
    family = of_config(config)
    is_own = config.model_type == family.model_type
    return family.classes() if is_own else family.library_classes()


def section_of(config: PreTrainedConfig) -> Any:
    """Build the `model:` section of an existing configuration without validating its values."""
    family = of_config(config)
    return family.Section.model_construct(**family.section_values(config))


def library_config(config: PreTrainedConfig, **changes: Any) -> PreTrainedConfig:
    """Convert to the library's configuration; valid only if `library_problems` is empty."""
    kind = of_config(config).library_classes().config
    known = kind().to_dict().keys() - NOT_FIELDS
    fields = {key: value for key, value in config.to_dict().items() if key in known}
    return kind(**fields | changes)
