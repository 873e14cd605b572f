"""Check that a text can be a path, in YAML and on command lines alike."""

from __future__ import annotations

import os
import re

# What Linux takes as a name and as a whole path, in bytes.
_MOST_NAME_BYTES, _MOST_PATH_BYTES = 255, 4095
# s3://, file:/, a::s3://, user@host:; `Path` makes one slash of two, and takes "./" off.
_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]+"
_ADDRESS = re.compile(rf"(?:\./+)*(?:(?:{_SCHEME}::)*{_SCHEME}:/|[^/@:]+@[^/@:]+:)")


def path_problem(text: str) -> str | None:
    """Return why a text can be no path of a file, a folder or a model; None where it can."""
    # Quotes alone are what a shell leaves of an argument that was meant to be empty.
    if not text.strip("\"' ") or text != text.strip():
        return "is no path"
    if any(ord(character) < 32 for character in text):
        return "is no path: it has control characters in it"
    encoded = os.fsencode(text)
    if max(map(len, encoded.split(b"/"))) > _MOST_NAME_BYTES or len(encoded) > _MOST_PATH_BYTES:
        return (
            f"has a name longer than {_MOST_NAME_BYTES} bytes, or is longer than "
            f"{_MOST_PATH_BYTES:,}"
        )
    return None


def output_problem(text: str) -> str | None:
    """Return why nothing can be written to a path; None where it may be possible."""
    if _ADDRESS.match(text):
        return "is an address; results are written to folders of this machine alone"
    if text == "-":
        return "is no path: results are written to files, not to the standard output"
    return path_problem(text)
