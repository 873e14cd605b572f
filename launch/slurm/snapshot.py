"""A run's code and configuration as they are now, so that later edits change nothing for it.

A job may wait for days and restart for weeks. It runs from RUN/slurm/code, never from the checkout.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from cat_lm import __version__
from cat_lm.config import RunConfig
from cat_lm.core.errors import UserError
from cat_lm.core.files import write_json, write_text
from cat_lm.core.folders import atomic_folder
from cat_lm.core.outputs import read_listing, write_listing
from cat_lm.data.verified import DEFAULT_CACHE
from launch.slurm.folder import RunFolder

PROJECT = Path(__file__).resolve().parents[2]
PARTS = ("cat_lm", "configs", "data_prep", "eval", "launch", "train.py")
# Code is small; beyond this, data lies in the checkout and git does not ignore it.
MOST_BYTES = 256 * 2**20


def _own_files(copy: Path) -> list[str]:
    """List the files of a copy of the code, with what Python compiled of them."""
    compiled = (str(path.relative_to(copy)) for path in copy.rglob("__pycache__/*.pyc*"))
    return [*read_listing(copy), *compiled]


def save_code(folder: RunFolder, project: Path) -> dict[str, Any]:
    """Copies the checkout into RUN/slurm/code, with code.json and code.diff; returns code.json.

    Raises:
        UserError: what git does not ignore is too large to be code, or git refuses the checkout.
    """
    commit, files = _git_files(project) or (None, _all_files(project))
    untracked = _untracked(project, files) if commit else []
    # A stray file at the top may be anything, keys and passwords among it.
    strays = {name for name in untracked if not _is_code(name)}
    untracked, files = ([n for n in names if n not in strays] for names in (untracked, files))
    own = (folder.run, folder.slurm)
    files = [n for n in files if not any((project / n).is_relative_to(place) for place in own)]
    _check_size(project, files)
    with atomic_folder(folder.code, _own_files, "the copy of the code") as copy:
        for name in files:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(project / name, copy / name, follow_symlinks=True)
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


def resolved(config: RunConfig) -> dict[str, Any]:
    """The configuration's values with absolute paths: the job runs in another folder."""
    values = config.model_dump(mode="json")
    data, train = values["data"], values["train"]
    if data.get("path"):
        data["path"] = _absolute(data["path"])
    if data.get("mixture"):
        data["mixture"] = {_absolute(path): weight for path, weight in data["mixture"].items()}
    train["output_dir"] = str(RunFolder(train["output_dir"]).run)
    if data.get("cache_dir"):
        data["cache_dir"] = _absolute(data["cache_dir"])
    if train["init_from"]:
        train["init_from"] = _absolute(train["init_from"])
    return values


def inputs_of(values: dict[str, Any]) -> list[str]:
    """The local folders that a resolved configuration reads."""
    data = values["data"]
    paths = [data.get("path"), *(data.get("mixture") or {}), values["train"]["init_from"]]
    return [path for path in paths if path and not _is_url(path)]


def cache_of(values: dict[str, Any]) -> str:
    """Return the folder of copies and notes that cannot lie beside the data, `data.cache_dir`."""
    return _absolute(values["data"]["cache_dir"] or DEFAULT_CACHE)


def save_config(folder: RunFolder, values: dict[str, Any]) -> None:
    write_text(folder.config, yaml.safe_dump(values, sort_keys=False))


def _absolute(path: str) -> str:
    return path if _is_url(path) else os.path.abspath(os.path.expanduser(path))


def _is_url(path: str) -> bool:
    return "://" in path


def _git(project: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(project), "-c", "core.quotepath=off", *arguments],
            capture_output=True,
            timeout=120,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    # A diff may hold bytes of any encoding.
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


def _git_files(project: Path) -> tuple[str, list[str]] | None:
    """The commit and all files that are tracked or not ignored; None where git knows none."""
    top = _git(project, "rev-parse", "--show-toplevel")
    commit = _git(project, "rev-parse", "HEAD")
    if top is None and (project / ".git").exists() and shutil.which("git"):
        raise UserError(
            f"{project}: git refuses to tell the commit that this run is of; "
            f"`git -C {project} status` says why"
        )
    # A copy without .git inside some other repository is none of that repository's versions.
    if not top or not commit or Path(top.strip()).resolve() != project.resolve():
        return None
    names = _git(project, "ls-files", "-z", "--cached", "--others", "--exclude-standard") or ""
    files = sorted({name for name in names.split("\0") if (project / name).is_file()})
    return commit.strip(), files


def _is_code(name: str) -> bool:
    """Return True if an untracked file belongs to a run: in a part of ours, and not hidden."""
    return name.split("/")[0] in PARTS and not any(p.startswith(".") for p in name.split("/"))


def _untracked(project: Path, files: Iterable[str]) -> list[str]:
    names = _git(project, "ls-files", "-z", "--others", "--exclude-standard") or ""
    return sorted(set(names.split("\0")) & set(files))


def _all_files(project: Path) -> list[str]:
    found = []
    for part in PARTS:
        place = project / part
        paths = [place] if place.is_file() else place.rglob("*")
        found += [path for path in paths if path.is_file() and "__pycache__" not in path.parts]
    return sorted(str(path.relative_to(project)) for path in found)


def _check_size(project: Path, files: list[str]) -> None:
    sizes = {name: (project / name).stat().st_size for name in files}
    if sum(sizes.values()) > MOST_BYTES:
        largest = max(sizes, key=sizes.__getitem__)
        raise UserError(
            f"{project}: {sum(sizes.values()) >> 20} MiB would be copied as the run's code, more "
            f"than {MOST_BYTES >> 20}; the largest file is {largest}: move data out of the "
            "checkout or let .gitignore name it"
        )
