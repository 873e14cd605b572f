"""The families that attend and may convolve queries, keys and values: GPT-NeoX, as Pythia is."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, ClassVar

from cat_lm.architectures.base import Architecture, Summary, sizes_of
from cat_lm.model import attention, rules
from cat_lm.model.attention import Objective
from cat_lm.model.hf.sections.transformer import GPTNeoXSection
from cat_lm.ops.convolution import kinds
from cat_lm.ops.long_filter import filters


class Transformer(Architecture):
    """The base of the families whose section is a `TransformerSection`.

    Attributes:
        is_packed: whether one projection makes queries, keys and values.
    """

    is_packed: ClassVar[bool] = False

    scales_positions = True
    takes_convolutions = True
    free_keys = frozenset(
        # These keys do not change the meaning of any weight.
        {"attn_implementation", "hidden_dropout", "attention_dropout", "conv_init", "canon_init"}
        # Training may change these keys, to use a longer context than the checkpoint's.
        | {"rope_parameters", "attention_temperature", "temperature_scope"}
    )
    # The values that the library's class implies for a model without convolutions.
    _PLAIN: ClassVar[dict[str, Any]] = {
        "position_embedding": "rope",
        "qk_norm": "none",
        "canon": "none",
        "attention_temperature": 1,
        "attention": "softmax",
        "score_transform": "none",
        "value_transform": "none",
    }

    def library_problems(self, config: Any) -> list[str]:
        return [
            f"has {key}={value!r}; plain {self.title} has {plain!r}"
            for key, plain in self._PLAIN.items()
            if (value := getattr(config, key, plain)) != plain
        ]

    # Sections

    def section_values(self, config: Any) -> dict[str, Any]:
        """Return the section's values; RoPE's base and rotated fraction are moved into
        `rope_parameters`.

        What computes attention is the usual choice for it: a configuration does not say.
        """
        values = super().section_values(config)
        if usual := attention.usual_implementation(self.Section.model_construct(**values)):
            values["attn_implementation"] = usual
        rope = config.rope_parameters
        values["rope_theta"] = rope["rope_theta"]
        if rope.get("rope_type", "default") == "default":
            values["rope_parameters"] = None  # The section's other keys carry the same information.
        return values

    def differences(self, theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
        """Compare two models; options of convolutions are ignored if neither model has
        convolutions.
        """
        theirs, ours = attention.compared_keys(theirs, ours)
        for values in (theirs, ours):
            if values["conv_type"] != "none":
                options = kinds.chosen(SimpleNamespace(**values)).options
                values["conv_options"] = options and asdict(options)
        said, added = theirs, False
        for key, others in (("conv_type", "conv_"), ("canon", "canon_")):
            if theirs[key] == "none":
                said = {name: v for name, v in said.items() if not name.startswith(others)}
                said[key] = "none"
                added = added or ours[key] != "none"
        found = super().differences(said, ours)
        if added:
            found.append("python -m cat_lm.upcycle adds convolutions to a model")
        return found

    def problems(self, section: Any, context_length: int) -> list[str]:
        return [
            *super().problems(section, context_length),
            *attention.problems(section, section.attn_implementation),
            *attention.length_problems(section, context_length),
        ]

    def objective(self, section: Any, train: Any) -> Objective:
        return attention.pattern(section).objective(train)

    # Descriptions

    def summary(self, section: Any) -> Summary:
        kind, streams = section.conv_type, _streams(section)
        is_long, shared = rules.has_long_filters(section), rules.key_heads(section)
        facts = {key: getattr(section, key) for key in ("conv_filter", "conv_state") if is_long} | {
            "conv_type": kind,
            "conv_streams": section.conv_streams if streams else None,
            "conv_window": section.conv_window if streams and not is_long else None,
            "conv_mixing": section.conv_mixing if kinds.mixes_heads(kind) else None,
            "conv_activation": None if section.conv_activation == "none" else "silu",
            "position_embedding": section.position_embedding,
        }
        sizes = sizes_of(section, heads=section.num_attention_heads)
        if is_long:
            sizes["filter state"] = section.conv_state
        elif streams:
            sizes["window"] = section.conv_window
        if shared < section.num_attention_heads:
            sizes["key-value heads"] = shared
        title = f"convolution-augmented (CAT) {self.title}" if streams else self.title
        variant = section.conv_filter if is_long else kind
        return Summary(title, _words(section), facts, sizes, variant)

    def variants(self) -> dict[str, str]:
        """Return a variant without convolutions, one for each kind of convolution, and those of
        long filters.
        """
        every = {kind: kinds.get(kind).meaning for kind in kinds.names()}
        long = {
            kind.name: f"one filter for each head, {kind.meaning}, N={kind.usual_state}"
            for kind in map(filters.get, filters.names())
        }
        return {"none": "no convolution"} | every | long

    def variant_keys(self, variant: str, heads: int, context_length: int) -> dict[str, Any]:
        if variant not in filters.names():
            return {"conv_type": variant}
        window = {"conv_window": rules.DEFAULT_WINDOW}  # The default window need not be shown.
        state = filters.get(variant).usual_state
        return window | {"conv_type": "head", "conv_filter": variant, "conv_state": state}

    def describe_backend(self, key: str, config: Any, *how: Any) -> str:
        if key != "conv_backend":
            return super().describe_backend(key, config, *how)
        from cat_lm.model.hf.inspection import describe_backend

        said = describe_backend(config, *how, self.is_packed)
        attended = attention.pattern(config).describe_backend(config, *how[:2])
        return f"{said}; {attended}" if attended else said


class GPTNeoX(Transformer):
    """Biases everywhere, layer norms, an MLP of two matrices, attention and MLP in parallel."""

    name = "gpt_neox"
    title = "GPT-NeoX"
    model_type = "cat_neox"
    library_type = "gpt_neox"
    class_prefix, library_prefix = "Cat", "GPTNeoX"
    Section = GPTNeoXSection
    layer_weight = "gpt_neox.layers.{layer}.attention.query_key_value.weight"
    short_names: ClassVar[dict[str, str]] = {
        "none": "pythia",
        "head": "cat",
        "multihead": "mh_cat",
        "exponential": "cat_exp",
        "ssm": "cat_ssm",
    }
    unoffered_keys = ("hidden_act", "attention_bias")
    is_packed = True
    old_constants = r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$"

    def section_values(self, config: Any) -> dict[str, Any]:
        part = config.rope_parameters["partial_rotary_factor"]
        return super().section_values(config) | {"rotary_pct": part}


def _streams(section: Any) -> str:
    return "" if section.conv_type == "none" else section.conv_streams


def _words(section: Any) -> str:
    """Describe the filters, the other extras of a layer, and the positions."""
    parts = [_filter_words(section)]
    parts += [e.words for e in attention.chosen_entries(section).values() if e.words]
    if section.qk_norm != "none":
        first = section.qk_norm_place == "before"
        parts.append(f"{section.qk_norm} norm of q and k{' before it' if first else ''}")
    if places := rules.canon_places(section):
        parts.append(f"Canon {', '.join(places)} (W={section.canon_window})")
    positions = "RoPE" if section.position_embedding == "rope" else "no positions"
    shared = rules.key_heads(section)
    grouped = f"; {shared} heads of keys and values" * (shared < section.num_attention_heads)
    return f"{', '.join(parts)}; {positions}{grouped}"


def _filter_words(section: Any) -> str:
    if not _streams(section):
        return "no convolution"
    streams = ", ".join(_streams(section))
    said = f"{kinds.label(section)} convolution of {streams}, "
    if rules.has_long_filters(section):
        return f"{said}{section.conv_filter} filters of state N={section.conv_state}"
    said += f"W={section.conv_window}"
    said += f", rank {section.conv_rank}" if section.conv_rank > 1 else ""
    said += ", l1-normalised" if section.conv_norm == "l1" else ""
    return said + (", then SiLU" if section.conv_activation == "silu" else "")


ENTRY = GPTNeoX()
