"""The keys of models that attend and may convolve queries, keys and values: GPT-NeoX and Llama."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from cat_lm.core import numbers
from cat_lm.core.fields import entry_of, number, whole
from cat_lm.model import attention, rules
from cat_lm.model.hf.sections.base import GatedWidth, ModelSection, division_problems
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
Dropout = Annotated[float, number(numbers.FRACTION, below=1)]


class TransformerSection(ModelSection):
    """Heads, positions, attention, and the convolutions of queries, keys and values."""

    num_attention_heads: Annotated[int, whole(numbers.HEADS)] = Field(
        description="heads of queries"
    )
    rope_theta: Annotated[float, number(numbers.ROPE_BASE)] = Field(
        10000.0, description="base of the rotary positions"
    )
    position_embedding: Literal["rope", "none"] = Field(
        "rope", description="rotary positions, or none"
    )
    rope_parameters: Annotated[dict[str, Any] | None, AfterValidator(_check_rope)] = Field(
        None, description="scaled positions, such as {rope_type: yarn, factor: 4, …}"
    )
    attention_temperature: Annotated[float, number(numbers.TEMPERATURE)] = Field(
        1.0, description="logits are divided by it"
    )
    temperature_scope: Literal["logits", "rotary"] = Field(
        "logits", description="of attention_temperature: all, or those of rotated channels"
    )
    attention_dropout: Dropout = Field(
        0.0, description="chance that a weight of attention is dropped in training"
    )
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flex_attention"] = Field(
        "sdpa", description="what computes attention"
    )
    attention: _PatternName = Field(
        "softmax", description="how queries meet keys, with its options"
    )
    attention_options: dict[str, Any] | None = Field(
        None, description="of attention, as {name: value}"
    )
    score_transform: _ScoreTransformName = Field(
        "none", description="of the logits, with its options"
    )
    score_options: dict[str, Any] | None = Field(
        None, description="of score_transform, as {name: value}"
    )
    value_transform: _ValueTransformName = Field(
        "none", description="of the values, with its options"
    )
    value_options: dict[str, Any] | None = Field(
        None, description="of value_transform, as {name: value}"
    )
    # Convolutions
    conv_type: Annotated[str, entry_of(kinds.KINDS)] = Field(
        "none", description="kind of convolution, such as head, or none"
    )
    conv_window: Annotated[int, whole(numbers.WINDOW)] = Field(21, description="taps of a filter")
    conv_streams: str = Field("qkv", description="some of q, k and v")
    conv_init: Literal["identity", "uniform", "residual"] = Field(
        "identity", description="start of the filters"
    )
    conv_mixing: Literal["embeddings", "maps"] = Field(
        "embeddings", description="what a multihead convolution mixes; maps needs the stream v"
    )
    conv_activation: Literal["none", "silu"] = Field(
        "none", description="after the convolution, before norm and rotation"
    )
    # What filters are, the kernel of scores that they make, and norms of them, q and k
    conv_filter: Annotated[str, entry_of(filters.FILTERS)] = Field(
        "taps", description="or exponential, ssm: as long as the text, for each head"
    )
    conv_state: Annotated[int, whole(numbers.CONV_STATE)] = Field(
        0, description="N, the numbers of state of such a filter"
    )
    conv_rank: Annotated[int, whole(numbers.WINDOW)] = Field(
        1, description="of the scores' kernel that filters of q and k make, one for each head"
    )
    conv_norm: Literal["none", "l1"] = Field(
        "none", description="l1 divides a filter by its magnitudes' sum"
    )
    qk_norm: Literal["none", "l2", "rms"] = Field("none", description="of queries and keys")
    qk_norm_place: Literal["after", "before"] = Field(
        "after", description="of the convolution; always before the rotation"
    )
    # Canon layers of the block, see `CanonLayer`
    canon: str = Field("none", description="some of the places A, C and D, as in ACD; or none")
    canon_window: Annotated[int, whole(numbers.WINDOW)] = Field(4, description="taps of a filter")
    canon_init: Literal["uniform", "zero"] = Field("uniform", description="start of Canon layers")

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
        """Return which heads do not divide, and what of a layer knows of all of them."""
        windows = dict(self.windows)
        if not kinds.mixes_heads(self.conv_type):  # whole sequences of own heads are convolved
            windows.pop("conv_window", None)
        entries = attention.chosen_entries(self).values()
        return [
            *division_problems(parts, context_length, self.divided_counts, windows),
            *(problem for entry in entries for problem in entry.division_problems(self)),
        ]

    def portable(self) -> TransformerSection:
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
    intermediate_size: Annotated[int, whole(numbers.INTERMEDIATE_SIZE)] | None = Field(
        None, description="default: 4 x hidden_size"
    )
    rotary_pct: Annotated[float, number(numbers.FRACTION, above=0)] = Field(
        0.25, description="share of a head's channels that is rotated"
    )
    use_parallel_residual: bool = Field(
        True, description="attention and MLP read the same; false: one after the other"
    )
    layer_norm_eps: Annotated[float, number(numbers.NORM_EPSILON)] = Field(
        1e-5, description="added to variances in layer norms"
    )
    hidden_dropout: Dropout = Field(
        0.0,
        description="chance that an output of embedding, attention or MLP is dropped in training",
    )

    @property
    def inner_size(self) -> int:
        return self.intermediate_size or 4 * self.hidden_size

    def derived(self) -> dict[str, Any]:
        return {"intermediate_size": self.inner_size}


class LlamaSection(GatedWidth, TransformerSection):
    """Shape and kind of the model, in the names of `transformers`' Llama and CatLlamaConfig."""

    architecture: Literal["llama"] = "llama"
    intermediate_size: Annotated[int, whole(numbers.INTERMEDIATE_SIZE)] | None = Field(
        None, description="default: 8/3 x hidden_size, up to a multiple of 256"
    )
    num_key_value_heads: Annotated[int, whole(numbers.HEADS)] | None = Field(
        None, description="default: num_attention_heads; fewer are shared by groups of queries"
    )
    head_dim: Annotated[int, whole(numbers.HIDDEN_SIZE)] | None = Field(
        None, description="default: hidden_size / num_attention_heads"
    )
    rms_norm_eps: Annotated[float, number(numbers.NORM_EPSILON)] = Field(
        1e-6, description="added to mean squares in RMS norms"
    )
    attention_bias: bool = Field(False, description="biases in the projections of attention")
    mlp_bias: bool = Field(False, description="biases in the MLP")
