"""Llama (the papers' TF++), and CAT on it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from cat_lm.architectures.base import Classes
from cat_lm.architectures.transformer import AttentionKeys, ConvolutionKeys, Transformer
from cat_lm.architectures.transformer_parts import CanonKeys, KernelKeys
from cat_lm.core import numbers
from cat_lm.core.fields import number, whole
from cat_lm.model import rules

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class LlamaSection(CanonKeys, KernelKeys, ConvolutionKeys, AttentionKeys):
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

    @property
    def inner_size(self) -> int:
        """The width of the MLP."""
        return self.intermediate_size or rules.gated_width(self.hidden_size)


class Llama(Transformer):
    """RMS norms, no biases, a gated MLP of three matrices, all channels of a head rotated."""

    name = "llama"
    title = "Llama"
    model_type = "cat_llama"
    library_type = "llama"
    Section = LlamaSection
    embedding = "model.embed_tokens.weight"
    layer_weight = "model.layers.{layer}.self_attn.q_proj.weight"
    short_names: ClassVar[dict[str, str]] = {"none": "llama"}
    unoffered_keys = ("hidden_act",)
    old_constants = r"\.self_attn\.rotary_emb\.inv_freq$"

    def config_class(self) -> type[PreTrainedConfig]:
        """Import `CatLlamaConfig`."""
        from cat_lm.model.hf.configuration_llama import CatLlamaConfig

        return CatLlamaConfig

    def classes(self) -> Classes:
        """Import `CatLlamaConfig`, `CatLlamaForCausalLM` and `CatLlamaModel`."""
        from cat_lm.model.hf.modeling_llama import CatLlamaForCausalLM, CatLlamaModel

        return Classes(self.config_class(), CatLlamaForCausalLM, CatLlamaModel)

    def library_classes(self) -> Classes:
        """Import transformers' Llama."""
        from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

        return Classes(LlamaConfig, LlamaForCausalLM, LlamaModel)

    def fields(self, section: LlamaSection, vocab_size: int, context_length: int) -> dict[str, Any]:
        """Return the arguments of `CatLlamaConfig`."""
        fields = super().fields(section, vocab_size, context_length)
        return fields | {"intermediate_size": section.inner_size}

    def section_values(self, config: PreTrainedConfig) -> dict[str, Any]:
        """Return the section's keys, those of the heads as None where they say nothing."""
        values = super().section_values(config)
        heads = values["num_attention_heads"]
        usual = {"num_key_value_heads": heads, "head_dim": values["hidden_size"] // heads}
        return values | {key: None for key, value in usual.items() if values[key] == value}

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Check a config.json of Llama or CAT-Llama. Raises ValueError."""
        from cat_lm.model.hf.configuration_llama import check_settings

        check_settings(settings)

    def problems(self, section: LlamaSection, context_length: int) -> list[str]:
        """Return what does not go together, see `cat_lm.model.rules`."""
        return [
            *super().problems(section, context_length),
            *rules.key_value_problems(section),
            *rules.unmixed_problems(section),
            *rules.whole_rotation_problems(section),
            *rules.part_rotation_problems(section),
        ]

    def words(self, section: LlamaSection) -> str:
        """Name convolutions, positions, and heads that are shared."""
        shared = rules.key_heads(section)
        grouped = shared < section.num_attention_heads
        said = f"; {shared} heads of keys and values" if grouped else ""
        return super().words(section) + said

    def sizes(self, section: LlamaSection) -> dict[str, int]:
        """Return what the base gives, and the heads of keys and values where they are shared."""
        shared = rules.key_heads(section)
        grouped = shared < section.num_attention_heads
        return super().sizes(section) | ({"key-value heads": shared} if grouped else {})

    def plain_name(self, name: str) -> str:
        """Return the biases after the convolutions back to the projections."""
        return re.sub(r"\.convolution\.([qkv])_bias$", r".\1_proj.bias", name)


ENTRY = Llama()
