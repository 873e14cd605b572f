"""Llama (the papers' TF++), and CAT on it."""

from __future__ import annotations

from typing import Any, ClassVar

from cat_lm.architectures.families.gpt_neox import Transformer
from cat_lm.model.hf.sections.transformer import LlamaSection


class Llama(Transformer):
    """RMS norms, no biases, a gated MLP of three matrices, all channels of a head rotated."""

    name = "llama"
    title = "Llama"
    model_type = "cat_llama"
    library_type = "llama"
    class_prefix, library_prefix = "CatLlama", "Llama"
    Section = LlamaSection
    layer_weight = "model.layers.{layer}.self_attn.q_proj.weight"
    short_names: ClassVar[dict[str, str]] = {"none": "llama"}
    unoffered_keys = ("hidden_act",)
    old_constants = r"\.self_attn\.rotary_emb\.inv_freq$"

    def section_values(self, config: Any) -> dict[str, Any]:
        values = super().section_values(config)
        heads = values["num_attention_heads"]
        usual = {"num_key_value_heads": heads, "head_dim": values["hidden_size"] // heads}
        return values | {key: None for key, value in usual.items() if values[key] == value}


ENTRY = Llama()
