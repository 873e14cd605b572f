"""Code that computes: installed packages with families, mixers or kinds, and this project's commit.

A package names a module in its metadata, here in pyproject.toml:

    [project.entry-points."cat_lm.plugins"]
    mine = "my_package.for_cat_lm"

The module is imported once, when a registry is first asked for what it has, and calls `register` of
`cat_lm.architectures`, `cat_lm.mixers`, `cat_lm.model.attention`, `cat_lm.optimizers` or
`cat_lm.ops.convolution.kinds`.
Files of this project need no change, and every command knows the new names. An
example of each is in `docs/your_own_idea.md`.
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

# Reentrant: a plugin may ask a registry while it is imported.
_LOCK = threading.RLock()
_begun = False
_failed: UserError | None = None
_loaded: list[tuple[str, str, str]] = []  # name, package and module of each
_codes: dict[str, str] = {}  # the name of a package or a module on its own -> hash of its sources


def load() -> None:
    """Import the installed plugins once. Raises UserError, at every call, where one cannot be."""
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
        code_of(entry.module, entry.dist)
        _loaded.append((entry.name, package, entry.module))
    except (Exception, SystemExit) as error:  # whatever a plugin's module raises, exits too
        package = f" of {package}" if package else ""
        said = " ".join(str(error).split())
        raise UserError(
            f"plugin {entry.name}{package}: {entry.value} cannot be imported: "
            f"{type(error).__name__}{': ' if said else ''}{said}; mend or uninstall it"
        ) from error


def describe() -> dict[str, str]:
    """Return the plugins of this process's registries: name -> package and its sources."""
    return {name: f"{package}, {code_of(module)}" for name, package, module in _loaded}


def code_of(module: str, package: Distribution | None = None) -> str:
    """Hash the sources of an imported module's package, of which its version says nothing.

    Once in a process, for a plugin as it is imported: they may be edited while it computes.
    """
    top = module.partition(".")[0]
    if top not in _codes:
        digest = hashlib.sha256()
        for path in _sources(top, package):
            with contextlib.suppress(OSError):  # such as the lock that an editor leaves
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
    """Return True if an entry or a function is this project's, whose tests hold it to its text."""
    return entry.__module__.partition(".")[0] == "cat_lm"


def foreign_code(entry: object) -> str | None:
    """Hash the sources of an entry or a function that is no part of this project; else None."""
    return None if is_own(entry) else code_of(entry.__module__)


class CopiedCode(Versioned):
    """code.json, which `launch.slurm` puts beside a copy of the code."""

    commit: str | None
    dirty: bool | None


def commit() -> str | None:
    """Return the commit of this code, `+` behind it where tracked files differ; None if unknown.

    A copy by `launch.slurm` has that of what was copied. There is none of a repository that the
    code only lies in, as in a virtual environment.
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
