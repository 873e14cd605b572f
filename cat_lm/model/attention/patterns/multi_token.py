"""Multi-token attention: scores convolved over queries and keys (`attention: multi_token`)."""

from __future__ import annotations

from typing import Any, ClassVar

from cat_lm.model.attention import Pattern
from cat_lm.ops.convolution.multi_token_options import DEFAULTS, LONGEST, option_problems


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
    options: ClassVar[dict[str, Any]] = DEFAULTS

    def problems(self, model: Any, options: dict[str, Any]) -> list[str]:
        return [f"attention_options.{problem}" for problem in option_problems(**options)]

    def holds_state(self, model: Any) -> bool:
        return self.resolved(model.attention_options)["query_window"] > 1

    def reads_neighbours(self, model: Any) -> bool:
        options = self.resolved(model.attention_options)
        return max(options["query_window"], options["key_window"]) > 1

    def build(self, config: Any) -> Any:
        from cat_lm.model.attention.modules.multi_token import MultiTokenCore

        return MultiTokenCore(config.num_attention_heads, self.resolved(config.attention_options))


ENTRY = MultiToken()
