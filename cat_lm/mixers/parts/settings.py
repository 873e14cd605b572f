"""The settings of a mixer's streams and attention; imports no torch."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

from cat_lm.mixers.parts.options import ConvolutionOptions, DeltaOptions
from cat_lm.model.attention.settings import AttentionSettings


@dataclass(kw_only=True, repr=False, eq=False)
class StreamSettings(AttentionSettings):
    """The settings of a mixer's streams and attention, as a configuration has them.

    Attributes:
        value_width: channels of a head of values; None for those of queries and keys.
    """

    hidden_size: int
    num_attention_heads: int
    value_width: int | None = None
    attention_dropout: float = 0.0
    position_embedding: str = "none"
    rope_parameters: dict[str, Any] | None = None
    _attn_implementation: str = "sdpa"
    # What padding in a mixer's row means is said in `cat_lm.mixers.parts.base`.
    reads_padding: ClassVar[bool] = True
    takes_gaps: ClassVar[bool] = True
    keeps_padding: ClassVar[bool] = False

    def of_model(self) -> StreamSettings:
        """Return the settings of a layer in a language model, which lays its rows out itself."""
        own = copy.copy(self)
        own.takes_gaps, own.keeps_padding = False, True
        return own

    def stream_width(self, stream: str) -> int:
        """Return the channels of a stream's heads."""
        return self.value_width if stream == "v" and self.value_width else self.head_width


def stream_settings(
    options: ConvolutionOptions | DeltaOptions, width: int, **more: Any
) -> StreamSettings:
    """Make the settings that options of filters stand for, in a layer of `width` channels.

    Args:
        more: other settings.
    """
    convolved = {"conv_type": "none"}
    if options.streams:
        convolved = {"conv_type": options.conv_type, "conv_streams": options.streams}
    return StreamSettings(
        hidden_size=width,
        num_attention_heads=options.heads,
        conv_window=options.window,
        conv_init=options.init,
        conv_filter=getattr(options, "filter", "taps"),
        conv_state=getattr(options, "filter_state", None) or 0,
        **convolved,
        **more,
    )
