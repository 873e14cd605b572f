"""GPT-NeoX, as Pythia is, and CAT on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from cat_lm.architectures.transformer import Transformer
from cat_lm.model.hf.sections.transformer import GPTNeoXSection

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class GPTNeoX(Transformer):
    """Biases everywhere, layer norms, an MLP of two matrices, attention and MLP in parallel."""

    name = "gpt_neox"
    title = "GPT-NeoX"
    model_type = "cat_neox"
    library_type = "gpt_neox"
    class_prefix, library_prefix = "Cat", "GPTNeoX"
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

    def section_values(self, config: PreTrainedConfig) -> dict[str, Any]:
        """Return the section's keys; `rope_parameters` holds the rotated part."""
        part = config.rope_parameters["partial_rotary_factor"]
        return super().section_values(config) | {"rotary_pct": part}


ENTRY = GPTNeoX()
