"""What lies in a folder: kind, size and content of every entry, and what has changed since."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

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
    with open(entry.path, "rb") as stream:
        content = stream.read()
    return "file", len(content), hashlib.blake2b(content, digest_size=16).hexdigest()


def differences(before: Snapshot, after: Snapshot) -> dict[str, str]:
    """Relative names of what differs, with `created`, `deleted` or `changed`."""
    changes = {name: "deleted" for name in before.keys() - after.keys()}
    changes |= {name: "created" for name in after.keys() - before.keys()}
    both = before.keys() & after.keys()
    return changes | {name: "changed" for name in both if before[name] != after[name]}
