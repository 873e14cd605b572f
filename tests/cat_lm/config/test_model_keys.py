"""Every key of `model:` of the first family changes the model: none does nothing."""

from __future__ import annotations

import runpy

import pytest
import torch

from cat_lm import architectures
from cat_lm.config import RunConfig
from cat_lm.model import CatForCausalLM
from cat_lm.ops.convolution import kinds
from cat_lm.training.building import build_model
from tests.cat_lm.model.attention_entries import entries  # noqa: F401
from tests.conftest import REPOSITORY
from tests.runs import run_values

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
NEIGHBOUR = {"conv_type": "neighbour", "num_attention_heads": 4}
MODEL_KEYS = {
    "hidden_size": {"hidden_size": 48},
    "num_hidden_layers": {"num_hidden_layers": 3},
    "num_attention_heads": {"num_attention_heads": 4},
    "intermediate_size": {"intermediate_size": 24},
    "vocab_size": {"vocab_size": 99},
    "rotary_pct": {"rotary_pct": 0.5},
    "rope_theta": {"rope_theta": 500.0},
    "rope_parameters": {"rope_parameters": YARN | {"attention_factor": 1.0}},
    "attention_temperature": {"attention_temperature": 0.9},
    "temperature_scope": {"temperature_scope": "rotary", "attention_temperature": 0.9},
    "position_embedding": {"position_embedding": "none"},
    "conv_type": {"conv_type": "depthwise"},
    "conv_window": {"conv_window": 3},
    "conv_streams": {"conv_streams": "v"},
    "conv_mixing": {"conv_mixing": "maps", "conv_type": "multihead"},
    "conv_activation": {"conv_activation": "silu", "conv_type": "depthwise"},
    "conv_init": {"conv_init": "uniform"},
    "conv_filter": {"conv_filter": "ssm", "conv_state": 2, "conv_window": 21},
    "conv_state": {"conv_filter": "ssm", "conv_state": 4, "conv_window": 21},
    "conv_norm": {"conv_norm": "l1"},
    "conv_options": NEIGHBOUR | {"conv_options": {"distance": 2}},
    "conv_rank": {"conv_rank": 2},
    "qk_norm": {"qk_norm": "l2"},
    "qk_norm_place": {"qk_norm_place": "before", "qk_norm": "rms"},
    "canon": {"canon": "ACD"},
    "canon_window": {"canon_window": 2, "canon": "A"},
    "canon_init": {"canon_init": "zero", "canon": "A"},
    "use_parallel_residual": {"use_parallel_residual": False},
    "tie_word_embeddings": {"tie_word_embeddings": True},
    "layer_norm_eps": {"layer_norm_eps": 1e-3},
    "hidden_dropout": {"hidden_dropout": 0.3},
    "attention_dropout": {"attention_dropout": 0.3},
    "attn_implementation": {"attn_implementation": "eager"},
    "attention": {"attention": "sigmoid"},
    "attention_options": {"attention": "sigmoid", "attention_options": {"offset": 3.0}},
    "score_transform": {"score_transform": "decay"},
    "score_options": {"score_transform": "decay", "score_options": {"start": 2.0}},
    "value_transform": {"value_transform": "box"},
    "value_options": {"value_transform": "box", "value_options": {"width": 5}},
}
# What else is another value than the default where a key says nothing without the others.
WITHOUT = {"conv_filter": {"conv_state": 0}, "conv_state": {"conv_state": 2}}


def test_list_of_model_keys_is_whole():
    section = architectures.get("gpt_neox").Section
    assert MODEL_KEYS.keys() == section.model_fields.keys() - {"architecture"}


@pytest.mark.usefixtures("entries")
@pytest.mark.parametrize("key", MODEL_KEYS)
def test_every_model_key_changes_the_model(key, monkeypatch):
    """Weights, outputs or the way to them differ."""
    monkeypatch.setattr(kinds.KINDS, "_entries", dict(kinds.KINDS._entries))
    runpy.run_path(str(REPOSITORY / "tests/own_ideas/convolution.py"))

    def model(changes: dict) -> CatForCausalLM:
        values = run_values("unused", "unused")
        values["model"] |= {"hidden_dropout": 0.0} | changes
        built = build_model(RunConfig.model_validate(values), vocab_size=50)
        generator = torch.Generator().manual_seed(1)
        for parameter in built.parameters():  # away from identity filters and zero biases
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
        return built.train()

    def outputs(built: CatForCausalLM) -> torch.Tensor:
        torch.manual_seed(0)
        return built(torch.arange(24)[None], use_cache=False).logits

    companions = {k: v for k, v in MODEL_KEYS[key].items() if k != key}
    companions |= WITHOUT.get(key, {})
    usual, changed = model(companions), model(MODEL_KEYS[key])
    if key == "attn_implementation":
        assert changed.config._attn_implementation == "eager"
    else:
        first, second = outputs(usual), outputs(changed)
        assert first.shape != second.shape or not torch.allclose(first, second, atol=1e-3)
