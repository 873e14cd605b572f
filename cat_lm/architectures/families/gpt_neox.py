"""GPT-NeoX, as Pythia is, and CAT on it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from cat_lm.architectures.base import Classes
from cat_lm.architectures.transformer import (
    AttentionKeys,
    ConvolutionKeys,
    Dropout,
    Transformer,
)
from cat_lm.architectures.transformer_parts import CanonKeys, KernelKeys
from cat_lm.core import numbers
from cat_lm.core.fields import number, whole
from cat_lm.model import rules

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class GPTNeoXSection(CanonKeys, KernelKeys, ConvolutionKeys, AttentionKeys):
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
        """The width of the MLP."""
        return self.intermediate_size or 4 * self.hidden_size


class GPTNeoX(Transformer):
    """Biases everywhere, layer norms, an MLP of two matrices, attention and MLP in parallel."""

    name = "gpt_neox"
    title = "GPT-NeoX"
    model_type = "cat_neox"
    library_type = "gpt_neox"
    Section = GPTNeoXSection
    embedding = "gpt_neox.embed_in.weight"
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

    def config_class(self) -> type[PreTrainedConfig]:
        """Import `CatConfig`."""
        from cat_lm.model.hf.configuration import CatConfig

        return CatConfig

    def classes(self) -> Classes:
        """Import `CatConfig`, `CatForCausalLM` and `CatModel`."""
        from cat_lm.model.hf.modeling import CatForCausalLM, CatModel

        return Classes(self.config_class(), CatForCausalLM, CatModel)

    def library_classes(self) -> Classes:
        """Import transformers' GPT-NeoX."""
        from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, GPTNeoXModel

        return Classes(GPTNeoXConfig, GPTNeoXForCausalLM, GPTNeoXModel)

    def fields(
        self, section: GPTNeoXSection, vocab_size: int, context_length: int
    ) -> dict[str, Any]:
        """Return the arguments of `CatConfig`."""
        fields = super().fields(section, vocab_size, context_length)
        return fields | {"intermediate_size": section.inner_size}

    def section_values(self, config: PreTrainedConfig) -> dict[str, Any]:
        """Return the section's keys; `rope_parameters` holds the rotated part."""
        part = config.rope_parameters["partial_rotary_factor"]
        return super().section_values(config) | {"rotary_pct": part}

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Check a config.json of GPT-NeoX or CAT. Raises ValueError."""
        from cat_lm.model.hf.configuration import check_settings

        check_settings(settings)

    def problems(self, section: GPTNeoXSection, context_length: int) -> list[str]:
        """Return what does not go together, see `cat_lm.model.rules`."""
        found = super().problems(section, context_length)
        return [*found, *rules.rotation_problems(section)]

    def plain_name(self, name: str) -> str:
        """Return the bias after the convolution back to the projection."""
        return re.sub(r"\.convolution\.bias$", ".query_key_value.bias", name)


ENTRY = GPTNeoX()
