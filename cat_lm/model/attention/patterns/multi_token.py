"""Multi-token attention: scores convolved over queries and keys (`attention: multi_token`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from cat_lm.model.attention.base import Pattern
from cat_lm.model.rules import attention_channels
from cat_lm.ops.convolution.multi_token_options import (
    DEFAULTS,
    LONGEST,
    mixings,
    option_problems,
    parameters,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn


class MultiToken(Pattern):
    """The exact form, for short rows; see `cat_lm.ops.convolution.multi_token`.

    Options: `query_window` and `key_window`, c_q and c_k; `head_mixing`, where maps are mixed over
    heads: none, before the softmax, after it, or both. All of it starts as softmax attention.
    """

    name = "multi_token"
    title = "multi-token attention"
    words = "multi-token attention"
    implementations = ("eager",)
    takes_transforms = False
    reads_positions = True
    longest = LONGEST
    options: ClassVar[Mapping[str, Any]] = DEFAULTS

    def problems(self, model: Any, options: dict[str, Any]) -> list[str]:
        """Return which options are wrong."""
        return [f"attention_options.{problem}" for problem in option_problems(**options)]

    def parameters(self, model: Any) -> int:
        """Count the kernels' taps and the weights between heads."""
        return parameters(model.num_attention_heads, **self.resolved(model.attention_options))

    def flops(self, model: Any, context_length: int) -> float:
        """Count as softmax, and 6 for every tap and weight of a score."""
        return context_length * (12 * attention_channels(model) + 6 * self.parameters(model))

    def saved_maps(self, model: Any, context_length: int, on_gpu: bool, precision: str) -> float:
        """Count what eager attention has not: scores before the kernel, and mixed maps.

        The scores have c_q − 1 rows more for a document; for others in the row none are counted.
        """
        mixed = len(mixings(self.resolved(model.attention_options)["head_mixing"]))
        halves = 1 + self._past(model) / context_length + mixed
        return model.num_attention_heads * halves / 2

    def state_bytes(self, model: Any, length: int, itemsize: int) -> int:
        """Count the last c_q − 1 queries."""
        return self._past(model) * attention_channels(model) * itemsize

    def holds_state(self, model: Any) -> bool:
        """Return True if a score reads earlier queries."""
        return self._past(model) > 0

    def reads_neighbours(self, model: Any) -> bool:
        """Return True if a score reads others of queries or keys side by side."""
        options = self.resolved(model.attention_options)
        return max(options["query_window"], options["key_window"]) > 1

    def _past(self, model: Any) -> int:
        """Count the earlier queries that a score reads."""
        return self.resolved(model.attention_options)["query_window"] - 1

    def build(self, config: Any) -> nn.Module:
        """Make the module."""
        from cat_lm.model.attention.modules.multi_token import MultiTokenCore

        return MultiTokenCore(config.num_attention_heads, self.resolved(config.attention_options))


ENTRY = MultiToken()
