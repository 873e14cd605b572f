"""Parameter names of the libraries' files as those of our models.

A family's configuration says its patterns: `AttentionSettings.renamings`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping


def renamed(name: str, renamings: Mapping[str, str]) -> str:
    """Translate one parameter's name by patterns and what takes their place, in their order."""
    for pattern, replacement in renamings.items():
        name = re.sub(pattern, replacement, name)
    return name
