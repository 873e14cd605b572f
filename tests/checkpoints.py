"""Checkpoints that tests make or damage: their markers, written as training writes them."""

from __future__ import annotations

import json
from pathlib import Path

from cat_lm.io.checksums import checksum
from cat_lm.training.checkpoint.records import MARKER, StoredFile, write_marker


def seal(folder: Path) -> None:
    """Make the marker of a step folder list its files as they are now."""
    write_marker(
        folder,
        {
            str(path.relative_to(folder)): StoredFile(
                bytes=path.stat().st_size, checksum=checksum(path, "xxh3_128")
            )
            for path in folder.rglob("*")
            if path.is_file() and path.name != MARKER
        },
    )


def seal_as_before(folder: Path) -> None:
    """The same, as versions without checksums wrote it."""
    seal(folder)
    files = json.loads((folder / MARKER).read_text())["files"]
    sizes = {name: file["bytes"] for name, file in files.items()}
    (folder / MARKER).write_text(json.dumps({"files": sizes}))


def flip(path: Path, place: int = -5) -> None:
    """Change one bit of a file, whose size stays."""
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)
