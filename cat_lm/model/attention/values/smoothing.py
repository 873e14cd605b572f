"""Values averaged over neighbours: the smooth part of LaS attention.

Average pooling of each row of attention (Zimerman and Wolf, ICML 2024, equation 4) is pooling of
the values: AP(A) V = A (T V), with T[j, m] = 1/P for the P values m around j; here, those up to j.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from cat_lm.core.numbers import WINDOW
from cat_lm.core.readers import short
from cat_lm.model.attention.base import ValueTransform, whole_problems
from cat_lm.model.rules import chunk_size

if TYPE_CHECKING:
    from torch import nn

MODES = ("causal",)


class Smoothing(ValueTransform):
    """(1/P) Σ_{k<P} v_{j−k}, with zeros before the start: CAT's filter of values, fixed to a box.

    The paper's pooling is centred, and so reads ⌊P/2⌋ values that come after a key.
    """

    name = "smoothing"
    title = words = "smoothed values"
    takes_any_weights = True
    divides = True  # no head knows of another
    options: ClassVar[dict[str, Any]] = {"width": 5, "mode": "causal"}

    def problems(self, model: Any, options: dict[str, Any]) -> list[str]:
        """Return which options are wrong, or would let tokens see later ones."""
        width, mode = options["width"], options["mode"]
        found = whole_problems("value_options.width", width, WINDOW)
        if not found and width == 1:
            found.append("value_options.width=1: smooths nothing; use value_transform=none")
        if mode == "centred":
            found.append(
                "value_options.mode=centred: averages values of later tokens, which a language "
                "model is to predict; use causal"
            )
        elif mode not in MODES:
            found.append(f"value_options.mode={short(mode)}: must be {' or '.join(MODES)}")
        return found

    def length_problems(self, model: Any, length: int) -> list[str]:
        """Return whether the box is longer than a row."""
        width = self._width(model)
        if width <= length:
            return []
        return [
            f"value_options.width={width}: is beyond data.context_length={length}; its last taps "
            "would read nothing"
        ]

    def taps(self, model: Any) -> int:
        """Return P."""
        return self._width(model)

    def holds_state(self, model: Any) -> bool:
        """Return True: decoding reads earlier values as they were."""
        return True

    def build(self, config: Any, options: dict[str, Any]) -> nn.Module:
        """Make the module, which has no parameters."""
        from cat_lm.model.attention.modules.las import SmoothedValues

        return SmoothedValues(options["width"], chunk_size(config))

    def _width(self, model: Any) -> int:
        return self.resolved(model.value_options)["width"]


ENTRY = Smoothing()
