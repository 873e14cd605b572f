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

    def heads_of(self, section: LlamaSection, stream: str) -> int:
        """Count the heads of a stream; keys and values may have fewer."""
        heads = section.num_attention_heads
        return heads if stream == "q" else section.num_key_value_heads or heads

    def head_channels(self, section: LlamaSection) -> int:
        """Count the channels of a head."""
        return section.head_dim or super().head_channels(section)

    def activated_channels(self, section: LlamaSection) -> int:
        """Count the gate's channels and those that it gates."""
        return 2 * section.inner_size

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

    def num_parameters(self, section: LlamaSection, vocab_size: int) -> int:
        """Count the parameters."""
        width, inner = section.hidden_size, section.inner_size
        channels = self.head_channels(section)
        read = channels * sum(self.heads_of(section, stream) for stream in "qkv")
        written = channels * section.num_attention_heads
        attention = width * (read + written)
        attention += read + width if section.attention_bias else 0
        mlp = 3 * width * inner + (2 * inner + width if section.mlp_bias else 0)
        tables = 1 if section.tie_word_embeddings else 2
        return (
            section.num_hidden_layers * (attention + mlp + 2 * width)
            + self.elementwise_parameters(section)
            + width
            + tables * (section.vocab_size or vocab_size) * width
        )

    def saved_tensors(self, section: LlamaSection) -> float:
        """Count what autograd keeps of a layer, in tensors of [B, T, C].

        The two inputs of norms, normed (which their weights multiply) and as they leave, queries,
        keys and values, attention's output, and the MLP's four of width I: the gate before and
        after its activation, what it multiplies, and the product. Convolutions keep what they read.
        """
        unit = self.head_channels(section) / section.hidden_size
        parts = {stream: unit * self.heads_of(section, stream) for stream in "qkv"}
        tensors = 6.0 + sum(parts.values()) + parts["q"]
        tensors += 4.0 * section.inner_size / section.hidden_size
        tensors += self._saved_by_attention(section) + self._saved_by_canon(section)
        convolved = sum(parts[stream] for stream in self.streams(section))
        return tensors + convolved * (2 if section.conv_activation == "silu" else 1)

    def saved_in_fp32(self, section: LlamaSection) -> float:
        """Count the inputs of the norms, too, which Llama's class casts first."""
        return 2.0 + super().saved_in_fp32(section)

    def words(self, section: LlamaSection) -> str:
        """Name convolutions, positions, and heads that are shared."""
        shared = self.heads_of(section, "k")
        grouped = shared < section.num_attention_heads
        said = f"; {shared} heads of keys and values" if grouped else ""
        return super().words(section) + said

    def sizes(self, section: LlamaSection) -> dict[str, int]:
        """Return what the base gives, and the heads of keys and values where they are shared."""
        shared = self.heads_of(section, "k")
        grouped = shared < section.num_attention_heads
        return super().sizes(section) | ({"key-value heads": shared} if grouped else {})

    def plain_name(self, name: str) -> str:
        """Return the biases after the convolutions back to the projections."""
        return re.sub(r"\.convolution\.([qkv])_bias$", r".\1_proj.bias", name)


ENTRY = Llama()
