"""Copy a run's code and configuration, so that later edits do not affect the run.

A job may wait for days and restart for weeks. It runs from RUN/slurm/code, never from the checkout.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from cat_lm import __version__
from cat_lm.config import RunConfig
from cat_lm.core.errors import UserError
from cat_lm.core.files import write_json, write_text
from cat_lm.core.folders import atomic_folder
from cat_lm.core.outputs import read_listing, write_listing
from cat_lm.core.readers import resolve
from cat_lm.data.verified import DEFAULT_CACHE
from launch.slurm.folder import RunFolder

PROJECT = Path(__file__).resolve().parents[2]
PARTS = ("cat_lm", "configs", "data_prep", "eval", "launch", "train.py")
# A larger checkout contains data that git does not ignore.
MOST_BYTES = 256 * 2**20


def save_code(folder: RunFolder, project: Path) -> dict[str, Any]:
    """Copy the checkout into RUN/slurm/code, with code.json and code.diff; return code.json.

    Raises:
        UserError: the files that git does not ignore are too large, or git refuses the checkout.
    """
    commit = _commit(project)
    files, untracked = _code_files(project, commit is not None)
    own = (folder.run, folder.slurm)
    files = [n for n in files if not any((project / n).is_relative_to(place) for place in own)]
    sizes = {name: (project / name).stat().st_size for name in files}
    if sum(sizes.values()) > MOST_BYTES:
        raise UserError(
            f"{project}: {sum(sizes.values()) >> 20} MiB would be copied as the run's code, more "
            f"than {MOST_BYTES >> 20}; the largest file is {max(sizes, key=sizes.get)}: move data "
            "out of the checkout or let .gitignore name it"
        )
    with atomic_folder(folder.code, _own_files, "the copy of the code") as copy:
        for name in files:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(project / name, copy / name)
        write_listing(copy)
    diff = _git(project, "diff", "--binary", "HEAD") if commit else None
    record = {
        "format": 1,
        "cat_lm": __version__,
        "commit": commit,
        "dirty": bool(diff or untracked) if commit else None,
        "untracked": untracked,
        "project": str(project),
        "files": len(files),
    }
    if diff is None:
        folder.code_diff.unlink(missing_ok=True)
    else:
        write_text(folder.code_diff, diff)
    write_json(folder.code_record, record)
    return record


def _own_files(copy: Path) -> list[str]:
    """Return the files of a copy of the code, including those that Python compiled."""
    compiled = (str(path.relative_to(copy)) for path in copy.rglob("__pycache__/*.pyc*"))
    return [*read_listing(copy), *compiled]


def _commit(project: Path) -> str | None:
    """Return the commit of the checkout, or None."""
    top, commit = (_git(project, "rev-parse", what) for what in ("--show-toplevel", "HEAD"))
    if top is None and (project / ".git").exists() and shutil.which("git"):
        raise UserError(
            f"{project}: git refuses to tell the commit that this run is of; "
            f"`git -C {project} status` says why"
        )
    # A copy without .git may be inside of another repository, whose commit does not apply.
    is_own = top and resolve(top.strip()) == resolve(project)
    return commit.strip() if is_own and commit else None


def _code_files(project: Path, in_git: bool) -> tuple[list[str], list[str]]:
    """Return (the files of a run's code, those of them that git does not track)."""
    if not in_git:
        paths = [path for part in PARTS for path in (project / part, *(project / part).rglob("*"))]
        paths = [path for path in paths if path.is_file() and "__pycache__" not in path.parts]
        return sorted(str(path.relative_to(project)) for path in paths), []

    def listed(*options: str) -> set[str]:
        names = _git(project, "ls-files", "-z", *options) or ""
        return {name for name in names.split("\0") if (project / name).is_file()}

    untracked = listed("--others", "--exclude-standard")
    # Untracked files at the top level may be anything, even keys and passwords.
    strays = {name for name in untracked if not _is_code(name)}
    files = (listed("--cached") | untracked) - strays
    return sorted(files), sorted(untracked - strays)


def _is_code(name: str) -> bool:
    """Return True if an untracked file is in one of `PARTS` and not hidden."""
    return name.split("/")[0] in PARTS and not any(p.startswith(".") for p in name.split("/"))


def _git(project: Path, *arguments: str) -> str | None:
    """Return git's output, with invalid UTF-8 replaced; None if it fails."""
    words = ["git", "-C", str(project), "-c", "core.quotepath=off", *arguments]
    try:
        done = subprocess.run(words, capture_output=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


def resolve_paths(config: RunConfig) -> dict[str, Any]:
    """Return the values of a configuration with absolute paths, for a job in another folder."""
    values = config.model_dump(mode="json")
    data, train = values["data"], values["train"]
    for section, key in ((data, "path"), (data, "cache_dir"), (train, "init_from")):
        if section[key]:
            section[key] = _absolute(section[key])
    if data["mixture"]:
        data["mixture"] = {_absolute(path): weight for path, weight in data["mixture"].items()}
    train["output_dir"] = str(RunFolder(train["output_dir"]).run)
    return values


def inputs_of(values: dict[str, Any]) -> list[str]:
    """Return the local folders that a configuration with absolute paths reads."""
    data = values["data"]
    paths = [data["path"], *(data["mixture"] or {}), values["train"]["init_from"]]
    return [path for path in paths if path and "://" not in path]


def cache_of(values: dict[str, Any]) -> str:
    """Return the absolute path of the cache of data (`data.cache_dir`)."""
    return _absolute(values["data"]["cache_dir"] or DEFAULT_CACHE)


def save_config(folder: RunFolder, values: dict[str, Any]) -> None:
    write_text(folder.config, yaml.safe_dump(values, sort_keys=False))


def _absolute(path: str) -> str:
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))
