"""What registries ask of an entry, and how they take their own."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

# This package, and what modules are made with.
_LIBRARIES = ("cat_lm", "torch", "transformers", "triton")


def check_entry(
    what: str,
    entry: object,
    base: type,
    words: Iterable[str] = ("name",),
    methods: Iterable[str] = (),
) -> None:
    """Check that an entry has all that it must say of itself.

    Args:
        what: names the key in messages.
        base: the class whose subclass's instance it must be.
        words: attributes that hold text.
        methods: those of `base` that it must define.

    Raises:
        ValueError: naming the entry and what it lacks.
    """
    if not isinstance(entry, base):
        raise ValueError(f"{what} {entry!r}: must be an instance of a subclass of {base.__name__}")
    kind = type(entry)
    named = f"{what} {getattr(entry, 'name', kind.__name__)!r}"
    for word in words:
        value = getattr(entry, word, None)
        if not isinstance(value, str) or not value:
            raise ValueError(f"{named}: its class {kind.__name__} must give {word}, a text")
    lacking = [name for name in methods if getattr(kind, name) is getattr(base, name)]
    if lacking:
        raise ValueError(f"{named}: its class {kind.__name__} must define {', '.join(lacking)}")
    for name in dir(base):
        is_method = callable(getattr(base, name)) and not name.startswith("_")
        if is_method and not callable(getattr(kind, name)):
            raise ValueError(f"{named}: {kind.__name__}.{name} must be a method")


def is_own(entry: object) -> bool:
    """Tell whether an entry or a function is this project's, which its tests hold to its text."""
    return entry.__module__.partition(".")[0] == "cat_lm"


def module_problem(module: object) -> str | None:
    """Say that what a stranger's `build` gives is no module; None where it is one."""
    from torch import nn

    if isinstance(module, nn.Module):
        return None
    given = "None" if module is None else type(module).__name__
    return f"build gives {given}; must return an nn.Module"


def mishap(error: Exception) -> str:
    """Say in one line what went wrong in a stranger's code, and where in it."""
    said = " ".join(str(error).split())
    line = f"{type(error).__name__}{': ' if said else ''}{said}"
    packages = [sys.modules[name] for name in _LIBRARIES if name in sys.modules]
    folders = tuple(folder + os.sep for package in packages for folder in package.__path__)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(folders):
            return f"{line} ({Path(frame.filename).name}, line {frame.lineno})"
    return line


def take_built_in(
    package: str,
    names: Iterable[str],
    attribute: str,
    register: Callable[[Any], None],
    is_known: Callable[[str], bool],
) -> None:
    """Import a registry's own files, each of which has one entry of its name, with _ for -.

    A file has it in an attribute, or registers it when it is imported, as a plugin's does.

    Raises:
        ValueError: a file does neither.
    """
    for name in names:
        module = importlib.import_module(f"{package}.{name.replace('-', '_')}")
        if not is_known(name) and hasattr(module, attribute):
            register(getattr(module, attribute))
        if not is_known(name):
            raise ValueError(
                f"{module.__name__}: must have an entry of the name {name!r}, as {attribute} or "
                "given to register"
            )
