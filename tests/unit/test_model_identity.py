"""With identity filters, or none, the model is transformers' GPT-NeoX."""

import pytest
import torch

from tests.unit.tiny_models import (
    cat_model,
    each_variant,
    own_name,
    random_ids,
    stock_model,
    with_weights_of,
)

IDS = random_ids(2, 70)


def gradients(model, ids):
    model.zero_grad()
    model(ids, labels=ids, use_cache=False).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("rotary_pct", [0.25, 0.5, 1.0])
@each_variant("silu")
def test_logits_and_gradients_equal_stock(variant, rotary_pct, attn_implementation):
    fields = {"rotary_pct": rotary_pct, "attn_implementation": attn_implementation}
    stock = stock_model(**fields)
    model = with_weights_of(stock, **variant, **fields)
    logits, expected = model(IDS).logits, stock(IDS).logits
    if variant["conv_type"] == "none":
        assert torch.equal(logits, expected)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)

    ours, theirs = gradients(model, IDS), gradients(stock, IDS)
    for name, gradient in theirs.items():
        own = ours[own_name(model, name)]
        torch.testing.assert_close(own, gradient, rtol=1e-4, atol=1e-6, msg=name)


@torch.no_grad()
@pytest.mark.parametrize("rotary_pct", [0.25, 0.5, 1.0])
@each_variant("silu")
def test_flex_attention_equals_stock(variant, rotary_pct, plain_flex_attention):
    fields = {"rotary_pct": rotary_pct, "attn_implementation": "flex_attention"}
    stock = stock_model(**fields)
    model = with_weights_of(stock, **variant, **fields)
    torch.testing.assert_close(model(IDS).logits, stock(IDS).logits, rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("position_embedding", ["rope", "none"])
@each_variant("none")
def test_attention_functions_agree(variant, position_embedding, plain_flex_attention):
    """With filters that do something."""
    ids, mask = random_ids(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[0, :9] = 0
    first, *others = (
        cat_model(**variant, position_embedding=position_embedding, attn_implementation=name)(
            ids, attention_mask=mask
        ).logits[mask.bool()]
        for name in ("eager", "sdpa", "flex_attention")
    )
    for logits in others:
        torch.testing.assert_close(logits, first, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("streams", ["q", "k", "v", "qk", "qv", "kv", "vkq"])
def test_every_choice_of_streams_is_identity(streams):
    stock = stock_model()
    model = with_weights_of(stock, conv_streams=streams)
    torch.testing.assert_close(model(IDS).logits, stock(IDS).logits, rtol=1e-5, atol=1e-6)
    filters = {name for name, _ in model.named_parameters() if name.endswith("_filter")}
    assert filters == {
        f"gpt_neox.layers.{layer}.attention.convolution.{stream}_filter"
        for layer in range(2)
        for stream in streams
    }


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ],
    ids=["linear", "yarn"],
)
@torch.no_grad()
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("rotary_pct", [0.25, 0.5, 1.0])
@each_variant("silu")
def test_scaled_positions_equal_stock(
    variant, rope, rotary_pct, attn_implementation, plain_flex_attention
):
    fields = {"rope_parameters": {**rope, "rope_theta": 10000.0}, "rotary_pct": rotary_pct}
    fields["attn_implementation"] = attn_implementation
    stock = stock_model(**{**fields, "rope_parameters": dict(fields["rope_parameters"])})
    model = with_weights_of(stock, **variant, **fields)
    torch.testing.assert_close(model(IDS).logits, stock(IDS).logits, rtol=1e-5, atol=1e-6)


def test_no_positions_means_no_rotation():
    """Without convolution and positions, a token sees a set: earlier tokens may trade places."""
    ids = random_ids(1, 12)
    swapped = ids[:, [3, 1, 2, 0, *range(4, 12)]]
    nope = cat_model(conv_type="none", position_embedding="none", num_hidden_layers=1)
    assert nope.gpt_neox.rotary_emb is None
    torch.testing.assert_close(nope(ids).logits[:, 4:], nope(swapped).logits[:, 4:])
    rope = cat_model(conv_type="none", num_hidden_layers=1)
    assert not torch.allclose(rope(ids).logits[:, 4:], rope(swapped).logits[:, 4:], atol=1e-3)
