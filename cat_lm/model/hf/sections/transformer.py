"""The keys of models that attend and may convolve queries, keys and values: GPT-NeoX and Llama."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from cat_lm.core import numbers
from cat_lm.core.fields import entry_of, number, whole
from cat_lm.model import attention, rules
from cat_lm.model.hf.sections.base import (
    GATED_WIDTH,
    Epsilon,
    GatedWidth,
    Heads,
    InnerWidth,
    ModelSection,
    Width,
    Window,
    division_problems,
    field,
)
from cat_lm.model.rope_scaling import check_rope_parameters
from cat_lm.ops.convolution import kinds
from cat_lm.ops.long_filter import filters


def _check_rope(rope: dict[str, Any] | None) -> dict[str, Any] | None:
    check_rope_parameters(rope)
    # Whoever reads them takes a key without a value for one that is given, and transformers warns
    # of a factor that is written as a whole number.
    return rope and {
        key: float(value) if key.endswith("factor") else value
        for key, value in rope.items()
        if value is not None
    }


# Here, as a section has a key `attention` of its own.
_PatternName = Annotated[str, entry_of(attention.REGISTRIES[attention.Pattern])]
_ScoreTransformName = Annotated[str, entry_of(attention.REGISTRIES[attention.ScoreTransform])]
_ValueTransformName = Annotated[str, entry_of(attention.REGISTRIES[attention.ValueTransform])]
_Base = Annotated[float, number(numbers.ROPE_BASE)]
_Rope = Annotated[dict[str, Any] | None, AfterValidator(_check_rope)]
_Temperature = Annotated[float, number(numbers.TEMPERATURE)]
_Implementation = Literal["eager", "sdpa", "flash_attention_2", "flex_attention"]
_KindName = Annotated[str, entry_of(kinds.KINDS)]
_FilterName = Annotated[str, entry_of(filters.FILTERS)]
_ConvState = Annotated[int, whole(numbers.CONV_STATE)]
_Part = Annotated[float, number(numbers.FRACTION, above=0)]
Dropout = Annotated[float, number(numbers.FRACTION, below=1)]


class TransformerSection(ModelSection):
    """Heads, positions, attention, and the convolutions of queries, keys and values."""

    num_attention_heads: Heads = field(..., "heads of queries")
    rope_theta: _Base = field(10000.0, "base of the rotary positions")
    position_embedding: Literal["rope", "none"] = field("rope", "rotary positions, or none")
    rope_parameters: _Rope = field(None, "scaled, as by {rope_type: yarn, factor: 4, …}")
    attention_temperature: _Temperature = field(1.0, "logits are divided by it")
    temperature_scope: Literal["logits", "rotary"] = field("logits", "channels with a temperature")
    attention_dropout: Dropout = field(0.0, "dropout of attention weights")
    attn_implementation: _Implementation = field("sdpa", "what computes attention")
    attention: _PatternName = field("softmax", "how queries meet keys, with its options")
    attention_options: dict[str, Any] | None = field(None, "of attention, as {name: value}")
    score_transform: _ScoreTransformName = field("none", "of the logits, with its options")
    score_options: dict[str, Any] | None = field(None, "of score_transform, as {name: value}")
    value_transform: _ValueTransformName = field("none", "of the values, with its options")
    value_options: dict[str, Any] | None = field(None, "of value_transform, as {name: value}")
    # Convolutions
    conv_type: _KindName = field("none", "kind of convolution, such as head, or none")
    conv_options: dict[str, Any] | None = field(None, "of conv_type, as {name: value}")
    conv_window: Window = field(21, "taps of a filter")
    conv_streams: str = field("qkv", "some of q, k and v")
    conv_init: Literal["identity", "uniform", "residual"] = field(
        "identity", "start of the filters"
    )
    conv_mixing: Literal["embeddings", "maps"] = field("embeddings", "what multihead filters mix")
    conv_activation: Literal["none", "silu"] = field("none", "after the convolution")
    # What filters are, the kernel of scores that they make, and norms of them, q and k
    conv_filter: _FilterName = field("taps", "or exponential, ssm: as long as the text")
    conv_state: _ConvState = field(0, "N, numbers of state of long filters")
    conv_rank: Window = field(1, "rank of the scores' kernel that q and k filters make")
    conv_norm: Literal["none", "l1"] = field("none", "l1 divides a filter by its magnitudes' sum")
    qk_norm: Literal["none", "l2", "rms"] = field("none", "norm of queries and keys")
    qk_norm_place: Literal["after", "before"] = field("after", "by the convolution")
    # Canon layers of the block, see `CanonLayer`
    canon: str = field("none", "some of the places A, C and D, as in ACD; or none")
    canon_window: Window = field(4, "taps of a filter")
    canon_init: Literal["uniform", "zero"] = field("uniform", "start of Canon layers")

    @property
    def windows(self) -> dict[str, int]:
        windows = {}
        if self.conv_type != "none" and not rules.has_long_filters(self):
            windows["conv_window"] = self.conv_window
        if rules.canon_places(self):
            windows["canon_window"] = self.canon_window
        return windows

    @property
    def divided_counts(self) -> dict[str, int]:
        counts = {"num_attention_heads": self.num_attention_heads}
        if (shared := rules.key_heads(self)) != self.num_attention_heads:
            counts["num_key_value_heads"] = shared
        return counts

    def shape_problems(self) -> list[str]:
        return rules.problems(self)

    def division_problems(self, parts: int, context_length: int) -> list[str]:
        """Return the indivisible head counts, and the parts of a layer that need all heads."""
        windows = dict(self.windows)
        if not kinds.mixes_heads(self.conv_type):  # A rank convolves whole sequences of its heads.
            windows.pop("conv_window", None)
        entries = attention.chosen_entries(self).values()
        return [
            *division_problems(parts, context_length, self.divided_counts, windows),
            *(problem for entry in entries for problem in entry.division_problems(self)),
        ]

    def with_portable_attention(self) -> TransformerSection:
        if self.attn_implementation == "eager":
            return self
        changes: dict[str, Any] = {"attn_implementation": "sdpa"}
        score = attention.score_transform(self)
        if score is not None and "sdpa" not in (score.implementations or ("sdpa",)):
            # Flex attention computes it inside of its kernel.
            changes |= {"score_transform": "none", "score_options": None}
        return self.model_copy(update=changes)


class GPTNeoXSection(TransformerSection):
    """Shape and kind of the model, in the names of `transformers`' GPT-NeoX and CatConfig."""

    architecture: Literal["gpt_neox"] = "gpt_neox"
    intermediate_size: InnerWidth | None = field(None, "default: 4 x hidden_size")
    rotary_pct: _Part = field(0.25, "share of a head's channels that is rotated")
    use_parallel_residual: bool = field(True, "attention and MLP read the same")
    layer_norm_eps: Epsilon = field(1e-5, "added to variances in layer norms")
    hidden_dropout: Dropout = field(0.0, "dropout after embedding, attention and MLP")

    @property
    def inner_size(self) -> int:
        return self.intermediate_size or 4 * self.hidden_size

    def derived(self) -> dict[str, Any]:
        return {"intermediate_size": self.inner_size}


class LlamaSection(GatedWidth, TransformerSection):
    """Shape and kind of the model, in the names of `transformers`' Llama and CatLlamaConfig."""

    architecture: Literal["llama"] = "llama"
    intermediate_size: InnerWidth | None = field(None, GATED_WIDTH)
    num_key_value_heads: Heads | None = field(None, "default: as queries; fewer are shared")
    head_dim: Width | None = field(None, "default: hidden_size / num_attention_heads")
    rms_norm_eps: Epsilon = field(1e-6, "added to mean squares in RMS norms")
    attention_bias: bool = field(False, "biases in the projections of attention")
    mlp_bias: bool = field(False, "biases in the MLP")
