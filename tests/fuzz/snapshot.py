"""What lies in a folder: kind, size and content of every entry, and what has changed since."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_LARGE = 2**28  # bytes; no case has such files, but a command may write one
Snapshot = dict[str, tuple[str, int, str]]


def snapshot(root: Path) -> Snapshot:
    """Every entry below `root` by its relative name: (kind, bytes, digest or a link's target)."""
    found: Snapshot = {}
    folders = [str(root)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                found[os.path.relpath(entry.path, root)] = _look(entry)
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
    return found


def _look(entry: os.DirEntry) -> tuple[str, int, str]:
    if entry.is_symlink():
        return "link", 0, os.readlink(entry.path)
    if entry.is_dir(follow_symlinks=False):
        return "folder", 0, ""
    if not entry.is_file(follow_symlinks=False):
        return "other", 0, ""
    size = entry.stat(follow_symlinks=False).st_size
    if size > _LARGE:
        return "file", size, "large"
    with open(entry.path, "rb") as stream:
        return "file", size, hashlib.file_digest(stream, "blake2s").hexdigest()


def differences(before: Snapshot, after: Snapshot) -> dict[str, str]:
    """Relative names of what differs, with `created`, `deleted` or `changed`."""
    changes = {name: "deleted" for name in before.keys() - after.keys()}
    changes |= {name: "created" for name in after.keys() - before.keys()}
    both = before.keys() & after.keys()
    return changes | {name: "changed" for name in both if before[name] != after[name]}
