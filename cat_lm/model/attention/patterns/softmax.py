"""Softmax attention over all earlier keys."""

from __future__ import annotations

from typing import Any

from cat_lm.model.attention import Pattern


class Softmax(Pattern):
    """softmax(Q Kᵀ / (t sqrt(D))) V."""

    name = "softmax"
    title = "softmax attention"
    takes_ranks = True
    divides = True  # Heads are independent.

    def build(self, config: Any) -> Any:
        from cat_lm.model.attention.modules.call import SoftmaxCore

        return SoftmaxCore()


ENTRY = Softmax()
