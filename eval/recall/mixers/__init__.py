"""Sequence mixers by name: each file here is one. Adding a mixer is adding a file.

A file offers

    LAYERS: int                      layers that the paper's comparison gives it
    Options                          a frozen dataclass, see eval/recall/options.py
    build(options, setting) -> Module   [B, T, C] to [B, T, C], causal

and, if it wants them, LEARNED_POSITIONS(options) -> bool (a learned table of positions is added to
the embeddings; default no) and BLOCK, `layer` (default) or `rms`, see eval/recall/model.py. A
module with `keeps_initialisation` true is left as it built itself. Names are file names with `-`
for `_`.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cat_lm.errors import UserError
from eval.recall.options import build_options, changed_options, parse_specification

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Setting:
    """Where a mixer stands: C, its layer's index from 0, and the number of layers."""

    d_model: int
    layer: int = 0
    num_layers: int = 1


@dataclass(frozen=True)
class Mixer:
    """A mixer with its options."""

    name: str
    options: Any
    layers: int
    learned_positions: bool
    block: str = "layer"

    @property
    def label(self) -> str:
        """`name` or `name:key=value,…`, with the options that differ from the defaults."""
        changed = ",".join(f"{k}={v}" for k, v in changed_options(self.options).items())
        return f"{self.name}:{changed}" if changed else self.name

    def describe(self) -> dict[str, Any]:
        """The label and all options, as plain values."""
        return {"label": self.label, "options": asdict(self.options)}

    def build(self, setting: Setting) -> nn.Module:
        """One layer's module.

        Raises:
            UserError: options that do not fit the width.
        """
        try:
            return _module(self.name).build(self.options, setting)
        except ValueError as error:
            raise UserError(f"mixer {self.label}: {error}") from None


def mixer_names() -> list[str]:
    """All names, without importing the files."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name.replace("_", "-") for name in found if not name.startswith("_"))


def make_mixer(specification: str) -> Mixer:
    """A mixer from text such as `cat` or `cat:streams=k,init=identity`.

    Raises:
        UserError: an unknown name or option.
    """
    name, given = parse_specification(specification)
    if name not in mixer_names():
        raise UserError(f"--mixer {name!r}: choose one of {', '.join(mixer_names())}")
    module = _module(name)
    options = build_options(module.Options, f"mixer {name}", given)
    positions = getattr(module, "LEARNED_POSITIONS", None)
    block = getattr(module, "BLOCK", "layer")
    return Mixer(name, options, module.LAYERS, bool(positions and positions(options)), block)


def _module(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
