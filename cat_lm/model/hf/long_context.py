"""What a model in memory does with positions and temperature; the rules are `rope_scaling`'s."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from cat_lm.model.attention.core import AttentionMixin
from cat_lm.model.attention.settings import AttentionSettings
from cat_lm.model.hf.causal_lm import CausalLanguageModel
from cat_lm.model.rope_scaling import logit_temperature

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def effective_scaling(model: PreTrainedModel) -> dict[str, Any]:
    """Read what a model in memory really does off its modules, not off what was asked for.

    Returns:
        rope_type (None without rotary positions), rope_factor, original_length, attention_factor
        (on cosines and sines, where it is YaRN's or the temperature's), attention_temperature (t of
        the logits, 1 where they are not scaled).

    Raises:
        RuntimeError: layers differ, or the modules do not do what the configuration says.
    """
    rotary = getattr(model.base_model, "rotary_emb", None)
    found = {
        "rope_type": None,
        "rope_factor": None,
        "original_length": None,
        "attention_factor": None,
        "attention_temperature": 1.0,
    }
    if rotary is not None and isinstance(getattr(rotary, "rope_type", None), str):
        rope = rotary.config.rope_parameters or {}
        found["rope_type"] = rope.get("rope_type", "default")
        found["rope_factor"] = rope.get("factor", 1.0)
        found["original_length"] = rope.get("original_max_position_embeddings")
        found["attention_factor"] = rotary.attention_scaling
    if isinstance(model, CausalLanguageModel) and isinstance(model.config, AttentionSettings):
        found["attention_temperature"] = _logit_temperature(model)
    return found


def _logit_temperature(model: PreTrainedModel) -> float:
    width = math.sqrt(model.config.head_width)
    factors = {
        module.scaling * width for module in model.modules() if isinstance(module, AttentionMixin)
    }
    expected = logit_temperature(model.config)
    if any(not math.isclose(factor * expected, 1, rel_tol=1e-9) for factor in factors):
        raise RuntimeError(f"attention scales logits by {factors}, not by 1/{expected}")
    return expected
