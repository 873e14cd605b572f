"""The registry that finds an object by the name in a configuration key or an option.

It holds the project's own objects ("entries"), each in a file that is imported when the entry is
first needed, and those that plugins register. A new entry of the project is one new file.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

from cat_lm.core import plugins
from cat_lm.core.errors import UserError
from cat_lm.core.readers import clipped

T = TypeVar("T")

# Frames of these packages are skipped when an error in a plugin is located.
_LIBRARIES = ("cat_lm", "torch", "transformers", "triton")


class UnknownName(UserError, ValueError):
    """No entry has this name; the message lists all names and the most similar one."""


class Registry(Generic[T]):
    """Entries by name.

    Args:
        key: the configuration key that chooses an entry, for error messages.
        base: the class that every entry is an instance of.
        package: a package with one module per entry, named as the entry. The module defines `ENTRY`
            or registers the entry itself.
        separator: replaces the _ of file names in the entries' names.
        words: attributes of an entry that must be non-empty text.
        methods: methods of `base` that an entry must override.
        check: a further check of an entry, which raises ValueError.
        others: further values that the key accepts, such as none.
        first: names of the package that are listed before the others, which are sorted.
        entries: entries of this project that have no files of their own.
    """

    def __init__(
        self,
        key: str,
        base: type[T],
        *,
        package: str | None = None,
        separator: str = "_",
        words: Iterable[str] = ("name",),
        methods: Iterable[str] = (),
        check: Callable[[T], None] = lambda entry: None,
        others: tuple[str, ...] = (),
        first: tuple[str, ...] = (),
        entries: Iterable[T] = (),
    ) -> None:
        self.key, self.base, self.others = key, base, others
        self._words, self._methods, self._check = tuple(words), tuple(methods), check
        modules = _modules(package, separator) if package else {}
        self._modules = {name: modules[name] for name in first} | modules
        self._entries: dict[str, T] = {}
        for entry in entries:
            self.register(entry)
        self._own = (*self._modules, *self._entries)

    def register(self, entry: T) -> None:
        """Add an entry. Raises ValueError if its name is taken or it is incomplete."""
        module = type(entry).__module__
        # A module of the project may register its own entry while it is imported.
        self._add(entry, is_taken=self._modules.get(getattr(entry, "name", ""), module) != module)

    def _add(self, entry: T, is_taken: bool) -> None:
        self._check_class(entry)
        if is_taken or entry.name in (*self._entries, *self.others):
            raise ValueError(f"{self.key} {entry.name!r}: there is one of this name already")
        self._check(entry)
        self._entries[entry.name] = entry

    def _check_class(self, entry: T) -> None:
        base, kind = self.base, type(entry)
        if not isinstance(entry, base):
            raise ValueError(
                f"{self.key} {entry!r}: must be an instance of a subclass of {base.__name__}"
            )
        named = f"{self.key} {getattr(entry, 'name', kind.__name__)!r}"
        its_class = f"{named}: its class {kind.__name__}"
        for word in self._words:
            if not isinstance(value := getattr(entry, word, None), str) or not value:
                raise ValueError(f"{its_class} must give {word}, a text")
        for name in dir(base):
            if name in self._methods and getattr(kind, name) is getattr(base, name):
                raise ValueError(f"{its_class} must define {name}")
            is_method = callable(getattr(base, name)) and not name.startswith("_")
            if is_method and not callable(getattr(kind, name)):
                raise ValueError(f"{named}: {kind.__name__}.{name} must be a method")

    def own_names(self) -> tuple[str, ...]:
        """Return the names of this project's entries, without importing plugins."""
        return self._own

    def names(self) -> tuple[str, ...]:
        """Return all names, this project's first. Raises UserError for a broken plugin."""
        plugins.load()
        return tuple(dict.fromkeys((*self._own, *self._entries)))

    def get(self, name: str, what: str = "") -> T:
        """Return an entry. Raises UnknownName, which begins with `what` (default: the key)."""
        # Entries of the project load no plugins, because compiled models call this function.
        if not isinstance(name, str) or name not in self._entries:
            self._find(name, what)
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self._entries or name in self.names())

    def problem(self, name: object) -> str | None:
        """Return None for a known name, otherwise a text that lists the allowed names."""
        if name in self or name in self.others:
            return None
        return one_of(name, (*self.others, *self.names()))

    def _find(self, name: Any, what: str) -> None:
        if isinstance(name, str) and name in self._modules:
            module = importlib.import_module(self._modules[name])
            if name not in self._entries:
                self._add(module.ENTRY, is_taken=False)
            if name not in self._entries:
                raise ValueError(f"{module.__name__}: its entry must be named {name!r}")
        elif name not in self:
            problem = one_of(name, (*self.others, *self.names()))
            raise UnknownName(f"{what or self.key}={clipped(repr(name))}: {problem}")


def one_of(name: object, known: Iterable[str]) -> str:
    """Return the text for an unknown name: the known names, and the most similar of them."""
    known = tuple(known)
    near = difflib.get_close_matches(str(name)[:60], known, 1)
    meant = f"; did you mean {near[0]}?" if near else ""
    return f"must be one of {', '.join(known)}{meant}"


def _modules(package: str, separator: str) -> dict[str, str]:
    # The modules are found without importing them.
    spec = importlib.util.find_spec(package)
    files = sorted(file.name for file in pkgutil.iter_modules(spec.submodule_search_locations))
    return {file.replace("_", separator): f"{package}.{file}" for file in files}


def module_problem(module: object) -> str | None:
    """Return why the result of a plugin's `build` is not an nn.Module; None where it is one."""
    from torch import nn

    if isinstance(module, nn.Module):
        return None
    given = "None" if module is None else type(module).__name__
    return f"build gives {given}; must return an nn.Module"


def describe_plugin_error(error: Exception) -> str:
    """Return an error of a plugin's code in one line, with the file and line that raised it."""
    said = " ".join(str(error).split())
    line = f"{type(error).__name__}{': ' if said else ''}{said}"
    packages = [sys.modules[name] for name in _LIBRARIES if name in sys.modules]
    folders = tuple(folder + os.sep for package in packages for folder in package.__path__)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(folders):
            return f"{line} ({Path(frame.filename).name}, line {frame.lineno})"
    return line
