"""Llama: the library's model without convolutions, filters of shared heads, sizes, names, decay."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import cat_lm  # noqa: F401
from cat_lm.model import CatLlamaConfig, CatLlamaForCausalLM
from cat_lm.model.hf.inspection import effective_scaling
from cat_lm.model.rope_scaling import yarn_temperature
from cat_lm.pretrained.conversion import scaled_config, scaled_fields
from tests.unit.tiny_models import (
    GROUPED,
    SIZES,
    cat_model,
    random_ids,
    stock_model,
)

IDS = random_ids(2, 70)
# TF++ of the paper's Table 2.
PAPER_MODEL = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 2816,
}


@torch.no_grad()
@pytest.mark.parametrize(
    ("method", "scope"),
    [("pi", "logits"), ("yarn", "rotary"), ("yarn", "logits"), ("pi+temperature", "logits")],
)
def test_longer_contexts_are_read_as_by_the_library(method, scope):
    """But for the temperature of all logits, which the library has not."""
    stock = stock_model(**GROUPED)
    fields = scaled_fields(stock.config, method, 4, 32, scope)
    config = scaled_config(stock.config, fields)
    assert type(config) is CatLlamaConfig and config.conv_type == "none"
    model = CatLlamaForCausalLM(config).eval()
    model.load_state_dict(stock.state_dict())
    found = effective_scaling(model)
    assert (found["rope_type"], found["rope_factor"]) == (fields["rope_parameters"]["rope_type"], 4)
    temperature = yarn_temperature(4) if "temperature" in method or method == "yarn" else 1.0
    temperature = 1.0 if scope == "rotary" else temperature
    assert found["attention_temperature"] == pytest.approx(temperature)
    shared = ("rope_parameters", "max_position_embeddings")
    changes = {key: value for key, value in fields.items() if key in shared}
    theirs = LlamaForCausalLM(LlamaConfig(**stock.config.to_dict() | changes)).eval()
    theirs.load_state_dict(stock.state_dict())
    for layer in theirs.model.layers:
        layer.self_attn.scaling /= temperature
    torch.testing.assert_close(model(IDS).logits, theirs(IDS).logits, rtol=1e-5, atol=1e-6)
    model.model.layers[0].self_attn.scaling = 1.0
    with pytest.raises(RuntimeError, match="attention scales logits"):
        effective_scaling(model)


def count(**fields):
    with torch.device("meta"):
        model = CatLlamaForCausalLM(CatLlamaConfig(**PAPER_MODEL | fields))
    return sum(parameter.numel() for parameter in model.parameters())


def test_parameter_counts():
    plain = 373_867_520
    assert count(conv_type="none") == plain
    assert count(conv_type="head", conv_window=21) == 373_891_712
    assert count(conv_type="depthwise", conv_window=4) == plain + 24 * 3 * 1024 * 4
    assert count(conv_type="multihead", conv_window=21) == plain + 24 * 3 * 21 * 256
    shared = {"num_key_value_heads": 4}
    with torch.device("meta"):
        stock = LlamaForCausalLM(LlamaConfig(**PAPER_MODEL | shared))
    grouped = sum(parameter.numel() for parameter in stock.parameters())
    assert count(**shared, conv_type="none") == grouped
    assert count(**shared, conv_type="head", conv_window=21) == grouped + 24 * 21 * (16 + 4 + 4)
    assert count(**shared, conv_type="multihead", conv_window=3) == grouped + 24 * 3 * (
        256 + 16 + 16
    )


def test_the_row_of_padding_is_trained():
    model = cat_model(family="llama")
    model(torch.zeros(1, 5, dtype=torch.long), labels=random_ids(1, 5)).loss.backward()
    assert model.model.embed_tokens.weight.grad[SIZES["pad_token_id"]].any()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads=3: must divide num_attention_heads=4"),
        ({"head_dim": 7}, "head_dim=7: rotates 7 of a head"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0: must be from"),
        ({"mlp_bias": "yes"}, "mlp_bias='yes': must be true or false"),
    ],
    ids=str,
)
def test_wrong_configurations_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        CatLlamaConfig(**SIZES, **fields)
