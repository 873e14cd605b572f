"""Hashes that identify the models of a result."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from cat_lm.pretrained.loading import weight_files
from cat_lm.pretrained.record import digests


def folder_sha256(folder: Path) -> str:
    """Hash a model's configuration and weights."""
    return joint_sha256([folder / "config.json", *weight_files(folder)])


def joint_sha256(paths: Iterable[Path]) -> str:
    """Hash the files' own SHA-256 sums, in the order given."""
    return hashlib.sha256("".join(digests(paths, "sha256").values()).encode()).hexdigest()
