"""JSON records that carry a checksum of their own values, so that damage to one is known."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from cat_lm.core.files import write_json

SEAL = "record_sha256"


def write_sealed(path: Path, record: dict[str, Any]) -> None:
    """Write a record and its checksum atomically as JSON."""
    stored = json.loads(json.dumps(record))  # keys and lists as they will be read
    write_json(path, {**stored, SEAL: _checksum(stored)})


def opened(record: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return a record without its seal, and whether the seal is that of its values."""
    record = dict(record)
    seal = record.pop(SEAL, None)
    return record, seal == _checksum(record)


def _checksum(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
