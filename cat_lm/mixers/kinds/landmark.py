"""Landmark CAT: attention over convolved streams to the blocks of keys that landmarks find.

`cat_lm.model.attention.modules.landmark` has the equations, `cat_lm.mixers.kinds.cat` the streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cat_lm.mixers.kinds import cat
from cat_lm.mixers.parts.base import Setting
from cat_lm.mixers.parts.options import check_choice, check_counts
from cat_lm.ops.landmark import options as landmark

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Options(cat.Options):
    """Options of Landmark CAT, beside CAT's.

    Attributes:
        block: b, the keys of a block.
        top_k: the blocks that a query chooses.
        local: the blocks near the query that it always reads, its own being one.
        sink: whether the first block is always read too.
        landmark_filter: box, exponential or learned.
        share: who chooses: each head, or the whole layer.
        training: guided, all keys and a loss for the landmarks; dense, all keys; hard, chosen
            blocks, as afterwards.
    """

    block: int = 16
    top_k: int = 4
    local: int = 2
    sink: bool = False
    landmark_filter: str = "box"
    share: str = "head"
    training: str = "guided"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "training", landmark.WAYS)
        check_counts(self, "block", "top_k", "local")
        for problem in landmark.value_problems(self.of_landmarks):
            raise ValueError(problem.replace("filter=", "landmark_filter=", 1))
        if self.mixes_maps:
            raise ValueError("conv_mixing=maps: cannot be combined with landmark attention")
        if self.is_sharp and self.training != "guided":
            raise ValueError(
                f"training={self.training}: gives the landmarks' parameters no gradient; choose "
                "guided"
            )

    @property
    def of_landmarks(self) -> dict[str, Any]:
        """The options that the pattern of attention has too, by its names."""
        names = ("block", "top_k", "local", "sink", "share")
        return {name: getattr(self, name) for name in names} | {"filter": self.landmark_filter}

    @property
    def is_sharp(self) -> bool:
        """Return True if heads have a θ."""
        return landmark.is_sharp(self.landmark_filter)


class LandmarkAttention(cat.ConvolvedAttention):
    """Attention to chosen blocks, over convolved streams."""

    name = "landmark"
    Options = Options
    own_loss = "landmark_loss"

    def attention_settings(self, options: Options) -> dict[str, Any]:
        chosen = {"attention": "landmark", "attention_options": options.of_landmarks}
        return super().attention_settings(options) | chosen

    def build(self, options: Options, setting: Setting) -> nn.Module:
        layer = super().build(options, setting)
        layer.core.training_by, layer.core.rows = options.training, landmark.USUAL_ROWS
        return layer


ENTRY = LandmarkAttention()
