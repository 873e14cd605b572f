"""The part of a cell's key that no option says: the code of what comes from a plugin."""

from __future__ import annotations

from cat_lm import mixers
from cat_lm.core import plugins
from cat_lm.core.fields import parse_specification
from cat_lm.ops.convolution import kinds


def code_of_mixer(specification: str) -> dict[str, str]:
    """Return what a key also has where a mixer or its convolution is a plugin's; else {}."""
    name, options = parse_specification(specification)
    entries: list[object] = [mixers.get(name)] if name in mixers.names() else []
    if (conv_type := options.get("conv_type")) in kinds.names():
        entries.append(kinds.get(conv_type).add_lag)
    codes = sorted(filter(None, map(plugins.foreign_code, entries)))
    return {"code": " ".join(codes)} if codes else {}
