"""Logits that decay exponentially with distance: the local part of LaS attention.

Zimerman and Wolf, *Viewing Transformers Through the Lens of Long Convolutions Layers* (ICML 2024),
equation 4: the logit of query i and key j ≤ i in head c is multiplied by e^{−α_c (i − j)}.
"""

from __future__ import annotations

from typing import Any, ClassVar

from cat_lm.core.readers import short
from cat_lm.model.attention import ScoreTransform
from cat_lm.model.rules import chunk_size
from cat_lm.ops.decay_rates import REACH, largest_rate

SPACINGS = ("slow", "steep")
LEAST = 1e-6  # The least B: below it 1 − B rounds to 1 in fp32, and the decays become exactly 0.


class ExponentialDecay(ScoreTransform):
    """l e^{−α_c (i − j)}, with a fixed rate α_c for each of the H heads; the first rate is 0.

    The paper says that e^{−α_c} is uniform in [0, B] and that α_c lies there, which cannot both be.
    `slow`: e^{−α_c} goes evenly from 1 to e^{−B}, so that α_c ≤ B; `steep`: from 1 to B.
    """

    name = "exponential_decay"
    title = words = "logits that decay with distance"
    form = "separable"
    takes_any_weights = True
    options: ClassVar[dict[str, Any]] = {"spacing": "slow", "bound": 1e-3}

    def problems(self, model: Any, options: dict[str, Any]) -> list[str]:
        spacing, bound = options["spacing"], options["bound"]
        found = []
        if spacing not in SPACINGS:
            known = ", ".join(SPACINGS)
            found.append(f"score_options.spacing={short(spacing)}: must be one of {known}")
        is_number = isinstance(bound, int | float) and not isinstance(bound, bool)
        if not is_number or not LEAST <= bound < 1:
            found.append(
                f"score_options.bound={short(bound)}: must be a number between {LEAST:g} and 1, "
                "the latter left out"
            )
        if model.num_attention_heads == 1:
            found.append(
                f"score_transform={self.name}: needs num_attention_heads of at least 2, as the "
                "first head does not decay"
            )
        return found

    def length_problems(self, model: Any, length: int) -> list[str]:
        # Flash attention can only use factors. Half precision is taken to be bf16, whose range is
        # that of fp32.
        if model.attn_implementation != "flash_attention_2" or not self.is_beyond(model, length):
            return []
        options = self.resolved(model.score_options)
        return [
            f"attn_implementation=flash_attention_2: cannot compute score_options.spacing="
            f"{options['spacing']} with bound={options['bound']} for {length} tokens, over which "
            f"logits decay by more than e^-{REACH:.0f}; use sdpa"
        ]

    def is_beyond(self, model: Any, length: int) -> bool:
        """Return True if over `length` tokens a head decays further than factors can represent."""
        length = min(length, chunk_size(model) or length)
        return largest_rate(**self.resolved(model.score_options)) * (length - 1) > REACH

    def splits_queries(self, model: Any) -> bool:
        return self.is_beyond(model, model.max_position_embeddings)

    def build(self, config: Any, options: dict[str, Any]) -> Any:
        from cat_lm.model.attention.modules.las import DecayScores

        return DecayScores(config.num_attention_heads, **options)


ENTRY = ExponentialDecay()
