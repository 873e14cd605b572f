"""Sequence mixers, [B, T, C] to [B, T, C], by name: one registry for language models and recall.

A mixer of this project is a file in `kinds/` with its module, its options, and an ENTRY that says
what it is (see `MixerKind`); it is imported when the mixer is first asked for. Those that attend
stand in `kinds/cat.py`. A mixer of an installed package or of a script is given to `register`. Each
is a name for `model.mixer` and for `eval.recall run --mixer` alike. This module imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from cat_lm.core.errors import UserError
from cat_lm.core.fields import build_options, parse_specification
from cat_lm.core.registry import Registry
from cat_lm.mixers.kinds.cat import OTHERS, pattern_mixers
from cat_lm.mixers.parts.base import CAPABILITIES, Mixer, MixerKind, Setting

__all__ = ["CAPABILITIES", "MIXERS", "Mixer", "MixerKind", "Setting"]
__all__ += ["get", "make", "make_mixer", "mixer_of", "mixer_problems", "names", "register"]


class MixerRegistry(Registry[MixerKind]):
    """The registry of mixers, including attention patterns not registered as mixers."""

    def own_names(self) -> tuple[str, ...]:
        """List this project's mixers, without patterns that have a name of their own."""
        return tuple(sorted(super().own_names()))

    def names(self) -> tuple[str, ...]:
        """List all mixers, this project's first. Raises UserError for a broken plugin."""
        for mixer in pattern_mixers(super().names()):
            self.register(mixer)
        return tuple(dict.fromkeys((*self.own_names(), *super().names())))


def _check(kind: MixerKind) -> None:
    """Check the declared attributes of a mixer. Raises ValueError."""
    if unknown := set(kind.supports) - set(CAPABILITIES):
        said, known = ", ".join(sorted(unknown)), ", ".join(CAPABILITIES)
        raise ValueError(f"mixer {kind.name!r}: supports {said}; known: {known}")
    options = getattr(kind, "Options", None)
    if not dataclasses.is_dataclass(options) or not options.__dataclass_params__.frozen:
        raise ValueError(f"mixer {kind.name!r}: its Options must be a frozen dataclass")


MIXERS = MixerRegistry(
    "mixer",
    MixerKind,
    package=f"{__name__}.kinds",
    separator="-",
    methods=("build",),
    check=_check,
    entries=OTHERS,
)
get, names, register = MIXERS.get, MIXERS.names, MIXERS.register


def make(name: str, options: Mapping[str, Any], what: str = "mixer") -> Mixer:
    """Build a mixer from its name and options, given as values or as text.

    Raises:
        UserError: an unknown name or option, or values that do not fit.
    """
    kind = get(name, what)
    return Mixer(kind, build_options(kind.Options, f"mixer {name}", options))


def make_mixer(specification: str, what: str = "--mixer") -> Mixer:
    """Parse a mixer specification such as `cat` or `cat:streams=k,init=identity`.

    Args:
        what: names the option in messages.

    Raises:
        UserError: an unknown name or option.
    """
    return make(*parse_specification(specification), what=what)


def mixer_of(model: Any) -> Mixer:
    """Return the mixer of a language model's section or configuration. Raises UserError."""
    return make(model.mixer, model.mixer_options or {})


def mixer_problems(model: Any) -> list[str]:
    """Return contradictions between a mixer, its options and the model's sizes, one line each by
    key.
    """
    try:
        mixer = mixer_of(model)
    except UserError as error:
        return [f"mixer_options: {error}"]
    layers, width = model.num_hidden_layers, model.hidden_size
    try:
        for layer in range(min(layers, 2)):  # All later layers are like the second.
            mixer.check(Setting(width, layer, layers))
    except UserError as error:
        return [f"mixer_options: {error} (hidden_size={width})"]
    rows = model.learned_positions
    if mixer.learned_positions and rows is None:
        return [
            f"learned_positions: mixer {mixer.label} needs a table of positions: give its rows, "
            "at least data.context_length; or set mixer_options.position to rope or none"
        ]
    if rows is not None and not mixer.learned_positions:
        return [f"learned_positions={rows}: has no effect with mixer {mixer.label}; leave it out"]
    return []
