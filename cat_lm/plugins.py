"""Installed packages that bring families of models, convolutions, attention or mixers of their own.

A package names a module in its metadata, here in pyproject.toml:

    [project.entry-points."cat_lm.plugins"]
    mine = "my_package.for_cat_lm"

The module is imported once, when a registry is first asked for what it has, and calls `register` of
`cat_lm.architectures`, `cat_lm.mixers`, `cat_lm.model.attention` or `cat_lm.ops.convolution.kinds`.
Files of this project need no change, and every command knows the new names. `cat_lm/README.md` has
an example of each.
"""

from __future__ import annotations

import threading
from importlib.metadata import EntryPoint, entry_points

from cat_lm.errors import UserError

GROUP = "cat_lm.plugins"

# Reentrant: a plugin may ask a registry while it is imported.
_LOCK = threading.RLock()
_begun = False
_failed: UserError | None = None


def load() -> None:
    """Import the plugins that are installed, each once in a process.

    Raises:
        UserError: one cannot be imported; every later call says so again.
    """
    global _begun, _failed
    with _LOCK:
        if not _begun:
            _begun = True
            try:
                for entry in sorted(set(entry_points(group=GROUP))):
                    _import(entry)
            except UserError as error:
                _failed = error
        if _failed is not None:
            raise _failed


def _import(entry: EntryPoint) -> None:
    try:
        entry.load()
    except Exception as error:  # whatever a stranger's module raises
        package = f" of {entry.dist.name} {entry.dist.version}" if entry.dist else ""
        said = " ".join(str(error).split())
        raise UserError(
            f"plugin {entry.name}{package}: {entry.value} cannot be imported: "
            f"{type(error).__name__}{': ' if said else ''}{said}; mend or uninstall it"
        ) from error
