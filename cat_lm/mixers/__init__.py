"""Sequence mixers, [B, T, C] to [B, T, C], by name: one registry for language models and recall.

A mixer of this project is a file in `kinds/` with its module, its options, and an ENTRY that says
what it is (see `MixerKind`); it is imported when the mixer is first asked for. A mixer of an
installed package or of a script is given to `register`. Each is a name for `model.mixer` and for
`eval.recall run --mixer` alike. This module imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from cat_lm.core.options import build_options, parse_specification
from cat_lm.core.registry import Registry
from cat_lm.mixers.parts.base import CAPABILITIES, Mixer, MixerKind, Setting
from cat_lm.model.attention import PATTERNS

__all__ = ["CAPABILITIES", "MIXERS", "Mixer", "MixerKind", "Setting"]
__all__ += ["get", "make", "make_mixer", "names", "register"]


def _check(kind: MixerKind) -> None:
    """Check what a mixer says of itself. Raises ValueError."""
    named = f"mixer {kind.name!r}"
    if set(kind.name) & set(":,= \n"):
        raise ValueError(f"{named}: a name has no spaces, colons, commas or =")
    if not isinstance(kind.supports, frozenset | set):
        raise ValueError(
            f"{named}: supports={kind.supports!r} must be a frozenset of names, as "
            'frozenset({"documents"})'
        )
    unknown = set(kind.supports) - set(CAPABILITIES)
    if unknown:
        raise ValueError(
            f"{named}: supports {', '.join(sorted(unknown))}; known: {', '.join(CAPABILITIES)}"
        )
    options = getattr(kind, "Options", None)
    if not dataclasses.is_dataclass(options) or not options.__dataclass_params__.frozen:
        raise ValueError(f"{named}: its Options must be a frozen dataclass")


class MixerRegistry(Registry[MixerKind]):
    """The mixers, those that patterns of attention are among them."""

    def names(self) -> tuple[str, ...]:
        """List all mixers, this project's first. Raises UserError for a broken plugin."""
        from cat_lm.mixers.patterns import mixer_names

        known = super().names()
        return (*known, *(n for n in mixer_names() if n not in (*known, *_OTHER_PATTERNS)))

    def _find(self, name: Any, what: str) -> None:
        if isinstance(name, str) and name not in self._modules and name in self.names():
            from cat_lm.mixers.patterns import PatternAttention, mixer_names

            if name not in self._entries:
                self.register(PatternAttention(PATTERNS.get(mixer_names()[name])))
        else:
            super()._find(name, what)


# Of these the mixers `attention` and `cat` have another name, or an option.
_OTHER_PATTERNS = ("softmax", "map-mixing")
MIXERS = MixerRegistry(
    "mixer",
    MixerKind,
    package=f"{__name__}.kinds",
    separator="-",
    methods=("build",),
    check=_check,
)
get, names, register = MIXERS.get, MIXERS.names, MIXERS.register


def make(name: str, options: Mapping[str, Any], what: str = "mixer") -> Mixer:
    """Make a mixer with options, as values or as text.

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
