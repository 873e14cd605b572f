"""A transform of attention's scores of one's own, `model.score_transform: log_distance`.

    l − s_h ln(1 + i − j)

for the logit l of query i, key j and head h, with a learned slope s_h for each head (the
logarithmic kernel of KERPLE; Chi et al., 2022).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cat_lm.model.attention import ScoreTransform, register
from cat_lm.model.attention.modules.scores import ScoreModule


class LogDistance(ScoreTransform):
    """What there is to know before a model is made."""

    name = "log_distance"
    title = words = "logarithmic distances"
    form = "additive"  # to the logit, which it does not read
    options = {"slope": 0.5}  # noqa: RUF012

    def problems(self, model: Any, options: dict[str, Any]) -> list[str]:
        slope = options["slope"]
        is_number = isinstance(slope, int | float) and not isinstance(slope, bool)
        return [] if is_number else [f"score_options.slope={slope!r}: must be a number"]

    def build(self, config: Any, options: dict[str, Any]) -> nn.Module:
        return LogDistanceScores(config.num_attention_heads, float(options["slope"]))


class LogDistanceScores(ScoreModule):
    """The slopes of a layer."""

    no_decay = ("slopes",)

    def __init__(self, heads: int, slope: float) -> None:
        super().__init__()
        self.slope = slope
        self.slopes = nn.Parameter(torch.empty(heads))

    def initial_values(self) -> dict[str, Tensor]:
        return {"slopes": torch.full_like(self.slopes, self.slope)}

    @staticmethod
    def score(
        logits: Tensor, query_position: Tensor, key_position: Tensor, head: Tensor, slopes: Tensor
    ) -> Tensor:
        # Of keys that come later, which are masked, the logarithm must be a number too.
        distance = (query_position - key_position).clamp(min=0)
        return logits - slopes[head] * torch.log1p(distance.to(slopes.dtype))


register(LogDistance())
