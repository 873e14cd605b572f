"""What the families have in common that attend and may convolve queries, keys and values."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from cat_lm.architectures.base import (
    Architecture,
    ModelSection,
    halo_problems,
    head_division_problems,
)
from cat_lm.core import numbers
from cat_lm.core.fields import entry_of, number, whole
from cat_lm.model import attention, rules
from cat_lm.model.attention.objective import Objective
from cat_lm.model.names import renamed
from cat_lm.model.rope_scaling import check_rope_parameters
from cat_lm.ops.convolution import kinds
from cat_lm.ops.long_filter import filters

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

# In the names of the parameters of patterns of attention, and of no others.
PATTERNS_OWN = ".core."


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


class AttentionKeys(ModelSection):
    """Heads, positions and what computes attention."""

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


class ConvolutionKeys(ModelSection):
    """The convolutions of queries, keys and values."""

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


class Transformer(Architecture):
    """A family whose section has `AttentionKeys`, `ConvolutionKeys` and those of the parts.

    Attributes:
        old_constants: a pattern of what old versions of transformers stored with the weights.
        is_packed: whether one projection makes queries, keys and values.
    """

    old_constants: ClassVar[str]
    is_packed: ClassVar[bool] = False

    scales_positions = True
    takes_convolutions = True
    free_keys = frozenset(
        # These change no weight's meaning,
        {"attn_implementation", "hidden_dropout", "attention_dropout", "conv_init", "canon_init"}
        # and these are what a run wants to train with: longer contexts than before.
        | {"rope_parameters", "attention_temperature", "temperature_scope"}
    )
    # Of a model without convolutions, what the library's class has one value of.
    _PLAIN: ClassVar[dict[str, Any]] = {
        "position_embedding": "rope",
        "qk_norm": "none",
        "canon": "none",
        "attention_temperature": 1,
        "attention": "softmax",
        "score_transform": "none",
        "value_transform": "none",
    }

    def attention_entries(self, section: Any) -> list[attention.Entry]:
        """List the pattern of attention and the transforms, see `cat_lm.model.attention`."""
        return list(attention.chosen_entries(section).values())

    # Sections and configurations

    def section_values(self, config: PreTrainedConfig) -> dict[str, Any]:
        """Return it as the base does; bases and parts of the rotation are in `rope_parameters`.

        What computes attention is the usual choice for it: a configuration does not say.
        """
        values = super().section_values(config)
        if usual := attention.usual_implementation(self.Section.model_construct(**values)):
            values["attn_implementation"] = usual
        rope = config.rope_parameters
        values["rope_theta"] = rope["rope_theta"]
        if rope.get("rope_type", "default") == "default":
            values["rope_parameters"] = None  # the section's other keys say it all
        return values

    def objective(self, section: Any, train: Any) -> Objective:
        """Return that of the pattern of attention."""
        return attention.pattern(section).objective(train)

    def prepare_training(self, model: PreTrainedModel, section: Any, train: Any) -> None:
        """Set what the pattern of attention asks for."""
        attention.pattern(section).prepare(model, train)

    def problems(self, section: Any, context_length: int) -> list[str]:
        """Return what does not go together, see `cat_lm.model.rules`."""
        return [
            *rules.head_problems(section),
            *rules.given_once_problems(section.rope_parameters, dict(section)),
            *rules.temperature_problems(section),
            *rules.filter_problems(section),
            *rules.convolution_problems(section),
            *rules.norm_problems(section),
            *rules.rank_problems(section),
            *rules.canon_problems(section),
            *rules.window_problems(section, context_length),
            *attention.problems(section, section.attn_implementation),
            *attention.length_problems(section, context_length),
        ]

    def division_problems(self, section: Any, parts: int, context_length: int) -> list[str]:
        """Return which heads do not divide, and what of a layer knows of all of them."""
        counts = {"num_attention_heads": section.num_attention_heads}
        if (shared := rules.key_heads(section)) != section.num_attention_heads:
            counts["num_key_value_heads"] = shared
        entries = self.attention_entries(section)
        windows = {}
        if kinds.mixes_heads(section.conv_type):
            windows["conv_window"] = section.conv_window
        if rules.canon_places(section):
            windows["canon_window"] = section.canon_window
        return [
            *head_division_problems(parts, counts),
            *(problem for entry in entries for problem in entry.division_problems(section)),
            *halo_problems(parts, context_length, windows),
        ]

    def differences(self, theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
        """Compare as the base; without convolutions their other keys say nothing."""
        free = attention.keys_of_any_weights(theirs, ours)
        theirs, ours = (values | attention.compared_options(values) for values in (theirs, ours))
        said, added = {name: v for name, v in theirs.items() if name not in free}, False
        for key, others in (("conv_type", "conv_"), ("canon", "canon_")):
            if theirs[key] == "none":
                said = {name: v for name, v in said.items() if not name.startswith(others)}
                said[key] = "none"
                added = added or ours[key] != "none"
        found = super().differences(said, ours)
        if added:
            found.append("python -m cat_lm.upcycle adds convolutions to a model")
        return found

    def keeps_weight(self, name: str, theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
        """Ask the pattern of attention for what is its own."""
        return PATTERNS_OWN not in name or attention.keeps_parameters(theirs, ours)

    def library_problems(self, config: PreTrainedConfig) -> list[str]:
        """Return what of a model, its convolutions aside, the library's class does not have."""
        return [
            f"has {key}={value!r}; plain {self.title} has {plain!r}"
            for key, plain in self._PLAIN.items()
            if (value := getattr(config, key, plain)) != plain
        ]

    def portable(self, section: Any) -> Any:
        """Return the same model with attention by torch, which keeps as much as other kernels."""
        if section.attn_implementation == "eager":
            return section
        changes: dict[str, Any] = {"attn_implementation": "sdpa"}
        score = attention.score_transform(section)
        if score is not None and "sdpa" not in (score.implementations or ("sdpa",)):
            # Flex attention computes it inside of its kernel.
            changes |= {"score_transform": "none", "score_options": None}
        return section.model_copy(update=changes)

    # Words

    def describe(self, section: Any) -> str:
        """Return what a model is, for its card."""
        name = super().describe(section)
        return f"convolution-augmented (CAT) {name}" if _streams(section) else name

    def words(self, section: Any) -> str:
        """Name the convolutions and the positions."""
        kind = _filter_words(section)
        for entry in self.attention_entries(section):
            kind += f", {entry.words}" if entry.words else ""
        if section.qk_norm != "none":
            first = section.qk_norm_place == "before"
            kind += f", {section.qk_norm} norm of q and k{' before it' if first else ''}"
        if places := rules.canon_places(section):
            kind += f", Canon {', '.join(places)} (W={section.canon_window})"
        positions = "RoPE" if section.position_embedding == "rope" else "no positions"
        return f"{kind}; {positions}"

    def facts(self, section: Any) -> dict[str, Any]:
        """Return the convolutions' keys, those that say nothing as None, and the positions."""
        kind = section.conv_type
        convolved, mixes = kind != "none", kinds.mixes_heads(kind)
        activates = section.conv_activation != "none"
        is_long = rules.has_long_filters(section)
        own = {key: getattr(section, key) for key in ("conv_filter", "conv_state") if is_long}
        return own | {
            "conv_type": kind,
            "conv_streams": section.conv_streams if convolved else None,
            "conv_window": section.conv_window if convolved and not is_long else None,
            "conv_mixing": section.conv_mixing if mixes else None,
            "conv_activation": section.conv_activation if activates else None,
            "position_embedding": section.position_embedding,
        }

    def sizes(self, section: Any) -> dict[str, int]:
        """Return layers, width, heads and, with convolutions, the window."""
        sizes = super().sizes(section) | {"heads": section.num_attention_heads}
        if rules.has_long_filters(section):
            return sizes | {"filter state": section.conv_state}
        return sizes | ({"window": section.conv_window} if _streams(section) else {})

    def variant(self, section: Any) -> str:
        """Name the kind of convolution, or of filters as long as the text."""
        return section.conv_filter if rules.has_long_filters(section) else section.conv_type

    def variants(self) -> dict[str, str]:
        """Return every kind of convolution, after none, and of filters as long as the text."""
        every = {kind: kinds.get(kind).meaning for kind in kinds.names()}
        return {"none": "no convolution"} | every | _long_variants()

    def variant_keys(self, variant: str, heads: int, context_length: int) -> dict[str, Any]:
        """Return the kind of convolution or of filters."""
        if variant in _long_variants():
            return _long_keys(variant)
        return {"conv_type": variant}

    def describe_backend(
        self, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, backend: str
    ) -> str:
        """Describe in one line what computes convolutions and attention; as in the base."""
        from cat_lm.model.hf.conv_backends import describe_backend

        said = describe_backend(config, device, dtype, backend, self.is_packed)
        attended = attention.pattern(config).describe_backend(config, device, dtype)
        return f"{said}; {attended}" if attended else said

    # Files of the library

    def own_name(self, config: PreTrainedConfig, name: str) -> str | None:
        """Translate a name by the patterns of this family's configuration class."""
        if re.search(self.old_constants, name):
            return None
        convolved = bool(getattr(config, "convolved_streams", ""))
        return renamed(name, self.config_class().renamings(convolved))


def _streams(section: Any) -> str:
    """Return the streams that have filters; "" without convolutions."""
    return "" if section.conv_type == "none" else section.conv_streams


def _long_variants() -> dict[str, str]:
    """Name every kind of filters as long as the text, with what it is; N as `long_keys` has it."""
    return {
        kind.name: f"one filter for each head, {kind.meaning}, N={kind.usual_state}"
        for kind in map(filters.get, filters.names())
    }


def _long_keys(name: str) -> dict[str, Any]:
    """Return the keys of a kind of filters as long as the text, of its usual N."""
    window = {"conv_window": rules.DEFAULT_WINDOW}  # which says nothing
    state = filters.get(name).usual_state
    return window | {"conv_type": kinds.HEAD.name, "conv_filter": name, "conv_state": state}


def _filter_words(section: Any) -> str:
    """Name the filters."""
    if not _streams(section):
        return "no convolution"
    streams = ", ".join(_streams(section))
    said = f"{section.conv_type} convolution of {streams}, "
    if rules.has_long_filters(section):
        return f"{said}{section.conv_filter} filters of state N={section.conv_state}"
    said += f"W={section.conv_window}"
    said += f", rank {section.conv_rank}" if section.conv_rank > 1 else ""
    said += ", l1-normalised" if section.conv_norm == "l1" else ""
    return said + (", then SiLU" if section.conv_activation == "silu" else "")
