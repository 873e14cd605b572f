"""Values averaged over neighbours: the smooth part of LaS attention.

Average pooling of each row of attention (Zimerman and Wolf, ICML 2024, equation 4) is pooling of
the values: AP(A) V = A (T V), with T[j, m] = 1/P for the P values m around j; here, those up to j.
"""

from __future__ import annotations

from typing import Any, ClassVar

from cat_lm.core.numbers import WINDOW
from cat_lm.model.attention import ValueTransform, whole_problems
from cat_lm.model.rules import chunk_size, tap_problems


class Smoothing(ValueTransform):
    """(1/P) Σ_{k<P} v_{j−k}, with zeros before the start: CAT's filter of values, fixed to a box.

    The paper's pooling is centred, and so reads ⌊P/2⌋ values that come after a key.
    """

    name = "smoothing"
    title = words = "smoothed values"
    takes_any_weights = True
    divides = True  # Heads are independent.
    options: ClassVar[dict[str, Any]] = {"width": 5}

    def problems(self, model: Any, options: dict[str, Any]) -> list[str]:
        width = options["width"]
        found = whole_problems("value_options.width", width, WINDOW)
        if not found and width == 1:
            found.append("value_options.width=1: smooths nothing; use value_transform=none")
        return found

    def length_problems(self, model: Any, length: int) -> list[str]:
        return tap_problems({"value_options.width": self.taps(model)}, length)

    def taps(self, model: Any) -> int:
        return self.resolved(model.value_options)["width"]

    def holds_state(self, model: Any) -> bool:
        return True  # Decoding reads the unsmoothed earlier values.

    def build(self, config: Any, options: dict[str, Any]) -> Any:
        from cat_lm.model.attention.modules.las import SmoothedValues

        return SmoothedValues(options["width"], chunk_size(config))


ENTRY = Smoothing()
