"""What goes together in a language model around a mixer; its section and configuration ask here.

Imports no torch.
"""

from __future__ import annotations

from typing import Any

from cat_lm import mixers
from cat_lm.core.errors import UserError
from cat_lm.mixers import Mixer, Setting


def settings_of(model: Any) -> list[Setting]:
    """Return where the mixer of each layer stands; `model` is a section or configuration."""
    layers = model.num_hidden_layers
    return [Setting(model.hidden_size, layer, layers) for layer in range(layers)]


def mixer_of(model: Any) -> Mixer:
    """Make the mixer of a section or configuration. Raises UserError."""
    return mixers.make(model.mixer, model.mixer_options or {})


def mixer_problems(model: Any) -> list[str]:
    """Return what of a mixer, its options and the sizes does not go together, by key."""
    try:
        mixer = mixer_of(model)
    except UserError as error:
        return [f"mixer_options: {error}"]
    try:
        for setting in settings_of(model)[:2]:  # all that a mixer may tell apart by
            mixer.check(setting)
    except UserError as error:
        return [f"mixer_options: {error} (hidden_size={model.hidden_size})"]
    rows = model.learned_positions
    if mixer.learned_positions and rows is None:
        return [
            f"learned_positions: mixer {mixer.label} needs a table of positions: give its rows, "
            "at least data.context_length; or set mixer_options.position to rope or none"
        ]
    if rows is not None and not mixer.learned_positions:
        return [f"learned_positions={rows}: has no effect with mixer {mixer.label}; leave it out"]
    return []
