"""Plugins, which are installed packages that register classes, and the versions of all code.

A package names a module as an entry point in its metadata, here in pyproject.toml:

    [project.entry-points."cat_lm.plugins"]
    mine = "my_package.for_cat_lm"

The module is imported once, when a registry is first searched, and calls `register` of
`cat_lm.architectures`, `cat_lm.mixers`, `cat_lm.model.attention`, `cat_lm.optimizers` or
`cat_lm.ops.convolution.kinds`.
Every command then knows the new names. `docs/your_own_idea.md` has an example of each.
"""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import sys
import threading
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path

from pydantic import ValidationError

from cat_lm.core.errors import UserError
from cat_lm.core.readers import Versioned

GROUP = "cat_lm.plugins"

# Reentrant, because a plugin may search a registry while it is imported.
_LOCK = threading.RLock()
_begun = False
_failed: UserError | None = None
_loaded: list[tuple[str, str, str]] = []  # the name, package and module of each plugin
_codes: dict[str, str] = {}  # top-level package or module -> hash of its sources


def load() -> None:
    """Import the installed plugins once. Every call raises UserError if an import has failed."""
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
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else ""
    try:
        entry.load()
        hash_sources(entry.module, entry.dist)
        _loaded.append((entry.name, package, entry.module))
    except (Exception, SystemExit) as error:  # A plugin's module may raise anything.
        package = f" of {package}" if package else ""
        said = " ".join(str(error).split())
        raise UserError(
            f"plugin {entry.name}{package}: {entry.value} cannot be imported: "
            f"{type(error).__name__}{': ' if said else ''}{said}; mend or uninstall it"
        ) from error


def describe() -> dict[str, str]:
    """Return the loaded plugins: name -> package, version and hash of the sources."""
    return {name: f"{package}, {hash_sources(module)}" for name, package, module in _loaded}


def hash_sources(module: str, package: Distribution | None = None) -> str:
    """Return a hash of the sources of an imported module's package.

    The version may stay the same when sources change. The hash is computed once per process, when a
    plugin is imported, since sources may be edited later.
    """
    top = module.partition(".")[0]
    if top not in _codes:
        digest = hashlib.sha256()
        for path in _sources(top, package):
            # It may be an editor's lock, which is a dangling link.
            with contextlib.suppress(OSError):
                digest.update(f"{path.name}\0".encode() + path.read_bytes())
        _codes[top] = digest.hexdigest()[:12]
    return _codes[top]


def _sources(top: str, package: Distribution | None) -> list[Path]:
    module = sys.modules.get(top)
    if places := getattr(module, "__path__", None):
        return sorted(path for place in places for path in Path(place).rglob("*.py"))
    if not (file := getattr(module, "__file__", None)):
        return []
    installed = [Path(package.locate_file(name)) for name in (package and package.files) or []]
    listed = sorted(path for path in installed if path.suffix == ".py")
    return listed if Path(file) in listed else sorted(Path(file).parent.glob("*.py"))


def is_own(entry: object) -> bool:
    """Return True if a registered object or a function belongs to this project, not to a plugin."""
    return entry.__module__.partition(".")[0] == "cat_lm"


def hash_plugin_sources(entry: object) -> str | None:
    """Return a hash of the sources of a plugin's object or function; None for this project's."""
    return None if is_own(entry) else hash_sources(entry.__module__)


class CopiedCode(Versioned):
    """The schema of code.json, which `launch.slurm` writes beside its copy of the code."""

    commit: str | None
    dirty: bool | None


def commit() -> str | None:
    """Return this code's commit, with "+" appended if tracked files were changed; None if unknown.

    For a copy made by `launch.slurm` it is the commit that was copied. A repository that does not
    track this file, such as one around a virtual environment, does not count.
    """
    checkout = Path(__file__).resolve().parents[2]
    try:
        record = CopiedCode.model_validate_json((checkout.parent / "code.json").read_bytes())
        return record.commit and record.commit + ("+" if record.dirty else "")
    except (OSError, ValidationError):
        pass

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", __file__)
        changed = git("status", "--porcelain", "--untracked-files=no", ".")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
