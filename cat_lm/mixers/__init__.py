"""Sequence mixers, [B, T, C] to [B, T, C], by name: one registry for language models and recall.

A mixer of this project is a torch-free file here, whose MIXER says what it is (see `MixerKind`),
its module in `modules/`, and its name in `_BUILT_IN`; a file that calls `register` works as well.
One of an installed package or of a script is given to `register`, and is then a name for
`model.mixer` and for `eval.recall run --mixer` alike.
Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from cat_lm.core import plugins
from cat_lm.core.errors import UserError
from cat_lm.core.options import build_options, parse_specification
from cat_lm.core.registry import check_entry, take_built_in
from cat_lm.mixers.base import CAPABILITIES, Mixer, MixerKind, Setting

__all__ = ["CAPABILITIES", "Mixer", "MixerKind", "Setting"]
__all__ += ["get", "make", "make_mixer", "names", "register"]

_BUILT_IN = (
    *("attention", "based", "cat", "deltanet", "gated-deltanet", "gla", "landmark"),
    *("lincat", "linear-attention", "mamba", "multi-token", "none"),
)

_KINDS: dict[str, MixerKind] = {}


def register(kind: MixerKind) -> None:
    """Add a mixer.

    Raises:
        ValueError: its name is taken or cannot stand in a specification, something is missing, or
            it claims what no mixer can do.
    """
    check_entry("mixer", kind, MixerKind, methods=("build", "mixing_flops", "saved_tensors"))
    if kind.name in _KINDS:
        raise ValueError(f"mixer {kind.name!r}: there is one of this name already")
    if not kind.name or set(kind.name) & set(":,= \n"):
        raise ValueError(f"mixer {kind.name!r}: a name has no spaces, colons, commas or =")
    if not isinstance(kind.supports, frozenset | set):
        raise ValueError(
            f"mixer {kind.name!r}: supports={kind.supports!r} must be a frozenset of names, as "
            'frozenset({"documents"})'
        )
    unknown = set(kind.supports) - set(CAPABILITIES)
    if unknown:
        raise ValueError(
            f"mixer {kind.name!r}: supports {', '.join(sorted(unknown))}; "
            f"known: {', '.join(CAPABILITIES)}"
        )
    options = getattr(kind, "Options", None)
    if not dataclasses.is_dataclass(options) or not options.__dataclass_params__.frozen:
        raise ValueError(f"mixer {kind.name!r}: its Options must be a frozen dataclass")
    if "state" in kind.supports and type(kind).state_numbers is MixerKind.state_numbers:
        raise ValueError(f"mixer {kind.name!r}: supports state, but does not define state_numbers")
    _KINDS[kind.name] = kind


def names() -> list[str]:
    """List the names of all mixers. Raises UserError where a plugin cannot be imported."""
    plugins.load()
    return sorted(_KINDS)


def get(name: str, what: str = "mixer") -> MixerKind:
    """Look a mixer up.

    Args:
        what: names the key or option in messages.

    Raises:
        UserError: there is none of that name, with those that there are.
    """
    if name not in names():
        raise UserError(f"{what} {name!r}: choose one of {', '.join(names())}")
    return _KINDS[name]


def make(name: str, options: Mapping[str, Any], what: str = "mixer") -> Mixer:
    """Give a mixer its options, as values or as text.

    Raises:
        UserError: an unknown name or option, or values that do not fit.
    """
    kind = get(name, what)
    return Mixer(kind, build_options(kind.Options, f"mixer {name}", options))


def make_mixer(specification: str, what: str = "--mixer") -> Mixer:
    """Make a mixer of text such as `cat` or `cat:streams=k,init=identity`.

    Args:
        what: names the option in messages.

    Raises:
        UserError: an unknown name or option.
    """
    return make(*parse_specification(specification), what=what)


take_built_in(__name__, _BUILT_IN, "MIXER", register, _KINDS.__contains__)
