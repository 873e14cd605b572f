"""Softmax attention with learned, rotary or no positions: Zoology's layer, one head."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from cat_lm.mixers.kinds import cat
from cat_lm.mixers.parts.options import check_choice, check_counts, check_fraction


@dataclass(frozen=True)
class Options:
    """Options of attention.

    Attributes:
        position: learned (a table added to the embeddings), rope or none.
        heads: H.
        bias: of the projections.
        dropout: of the attention map.
    """

    position: str = "learned"
    heads: int = 1
    bias: bool = True
    dropout: float = 0.1

    def __post_init__(self) -> None:
        check_counts(self, "heads")
        check_fraction(self, "dropout")
        check_choice(self, "position", cat.POSITIONS)

    @property
    def plain(self) -> cat.Options:
        """The same layer as CAT without filters."""
        return cat.Options(streams=None, **dataclasses.asdict(self))


class SoftmaxAttention(cat.ConvolvedAttention):
    """CAT without filters."""

    name = "attention"
    Options = Options
    layers = 2


ENTRY = SoftmaxAttention()
