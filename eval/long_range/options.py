"""The options of the room's attention: which fit together, and which have an effect."""

from __future__ import annotations

from dataclasses import dataclass, fields

from cat_lm.core import numbers
from cat_lm.mixers.parts.base import check_choice, check_counts
from cat_lm.model.attention.scores.exponential_decay import LEAST, SPACINGS

POSITIONS = ("none", "sinusoidal", "rope", "alibi", "alibi-scaled")
VALUES = ("none", "box", "learned")
STARTS = ("identity", "box")
PLACES = ("auto", "causal", "centred")


@dataclass(frozen=True)
class Options:
    """Options of attention.

    Attributes:
        heads: H.
        position: none; sinusoidal, a table added to the embeddings; rope; alibi, a bias of −m_h per
            token of distance; alibi-scaled, that divided by √D, as the paper's equation 2 has it.
        decay: none; slow or steep, logits times e^{−α_h |i − j|}: see `ExponentialDecay`.
        bound: B, of the decay.
        values: none; box, averages over `width` neighbours; learned, CAT's filter of the values,
            one a head.
        width: P of the box, W of the filter.
        start: of a learned filter: identity, which changes nothing; or box, 1/W everywhere.
        place: of box and filter: causal, over a position and those before it; centred, over both
            sides, with an odd width; auto, causal in a causal model. The paper has centred boxes in
            causal models: they see (P − 1)/2 later positions.
        chunk: positions of a chunk, inside which all happens; 0: the whole row.
    """

    heads: int = 8
    position: str = "sinusoidal"
    decay: str = "none"
    bound: float = 1e-3
    values: str = "none"
    width: int = 5
    start: str = "identity"
    place: str = "auto"
    chunk: int = 0

    def __post_init__(self) -> None:
        check_counts(self, "heads", "width")
        for name, choices in (("position", POSITIONS), ("values", VALUES), ("start", STARTS)):
            check_choice(self, name, choices)
        check_choice(self, "place", PLACES)
        check_choice(self, "decay", ("none", *SPACINGS))
        if not LEAST <= self.bound < 1:
            raise ValueError(f"bound={self.bound}: must be between {LEAST:g} and 1, without 1")
        if self.chunk and (problem := numbers.CONTEXT.problem(self.chunk)):
            raise ValueError(f"chunk={self.chunk}: {problem}; 0 for the whole row")
        if self.decay != "none" and self.heads == 1:
            raise ValueError("heads=1: the first head does not decay; decay needs at least 2")
        if self.decay != "none" and self.position.startswith("alibi"):
            raise ValueError(f"decay={self.decay}: not with position={self.position}")
        self._check_effects()

    def _check_effects(self) -> None:
        default = {field.name: field.default for field in fields(self)}
        without = {"bound": self.decay == "none", "start": self.values != "learned"}
        without |= dict.fromkeys(("width", "place"), self.values == "none")
        for name, has_none in without.items():
            if has_none and getattr(self, name) != default[name]:
                needed = {"bound": "a decay", "start": "values=learned"}.get(name, "values")
                raise ValueError(f"{name}={getattr(self, name)}: has no effect without {needed}")
        if self.values != "none" and self.width == 1:
            raise ValueError("width=1: smooths nothing; use values=none")
        if self.place != "causal" and self.values != "none" and self.width % 2 == 0:
            raise ValueError(f"width={self.width}: a centred box is odd; or use place=causal")
