"""Mixers that every pattern of attention is by its name: CAT with this pattern.

A pattern that has a file in `kinds` of its own, with other names or defaults of options, is that.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from cat_lm.mixers.kinds import cat
from cat_lm.mixers.parts.base import Setting
from cat_lm.model import attention
from cat_lm.model.attention import PATTERNS, Pattern


def mixer_names() -> dict[str, str]:
    """Return the patterns that are mixers, by their names as such.

    A pattern whose options have names of CAT's, or defaults that no text can give, is none.
    """
    found = {}
    for name in PATTERNS.names():
        options = PATTERNS.get(name).options
        are_plain = all(isinstance(value, int | float | str) for value in options.values())
        if are_plain and not _CAT_OPTIONS & set(options):
            found[name.replace("_", "-")] = name
    return found


_CAT_OPTIONS = {field.name for field in dataclasses.fields(cat.Options)}


def _make_options(pattern: Pattern) -> type:
    """Make the class of options: CAT's and the pattern's."""
    own = [(name, type(value), value) for name, value in pattern.options.items()]
    return dataclasses.make_dataclass("Options", own, bases=(cat.Options,), frozen=True)


class PatternAttention(cat.ConvolvedAttention):
    """CAT with a pattern of attention."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern, self.name = pattern, pattern.name.replace("_", "-")
        self.Options = _make_options(pattern)
        self.longest, self.computes_on_cpu = pattern.longest, pattern.computes_on_cpu
        self.__module__ = type(pattern).__module__  # It is a plugin's where the pattern is one.

    def check(self, options: Any, setting: Setting) -> None:
        super().check(options, setting)
        settings = self.settings(options, setting.d_model)
        if problems := attention.problems(settings, settings._attn_implementation):
            raise ValueError(problems[0])

    def attention_settings(self, options: Any) -> dict[str, Any]:
        own = {name: getattr(options, name) for name in self.pattern.options}
        able = self.pattern.implementations
        by = "sdpa" if able is None or "sdpa" in able else min(able)
        chosen = {"attention": self.pattern.name, "attention_options": own}
        return super().attention_settings(options) | chosen | {"_attn_implementation": by}
