"""Causality, packed documents and padding: nothing leaks, in attention or in the convolution."""

import pytest
import torch

from cat_lm.model.hf.masks import sequence_layout
from tests.unit.tiny_models import cat_model, each_model, random_ids


@torch.no_grad()
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("window", [1, 2, 5, 21, 64])
@each_model("none")
def test_causality(variant, window, attn_implementation, plain_flex_attention):
    check_causality(
        cat_model(**variant, conv_window=window, attn_implementation=attn_implementation)
    )


@torch.no_grad()
@pytest.mark.parametrize("streams", ["q", "k", "v", "qk", "qv", "kv"])
@each_model("none")
def test_causality_of_every_choice_of_streams(variant, streams):
    if variant.get("conv_mixing") == "maps":
        streams = "v" + streams.replace("v", "")  # the stream whose filters mix the maps
    check_causality(cat_model(**variant, conv_streams=streams, conv_window=5))


def check_causality(model):
    ids = random_ids(1, 50)
    changed = ids.clone()
    changed[0, 30] = 1 + changed[0, 30] % 96
    before, after = model(ids).logits, model(changed).logits
    assert torch.equal(before[:, :30], after[:, :30])
    assert not torch.equal(before[:, 30:], after[:, 30:])


def test_a_value_filter_reaches_exactly_its_window():
    """With value filters only and attention to itself alone, output t depends on t−W+1 … t."""
    model = cat_model(conv_streams="v", conv_window=4)
    attention = model.gpt_neox.layers[0].attention
    x = torch.randn(1, 20, 32, requires_grad=True)
    _, _, value = attention.convolution(attention.query_key_value(x))
    (gradient,) = torch.autograd.grad(value[0, 10].sum(), x)
    assert gradient[0].any(dim=1).nonzero().flatten().tolist() == [7, 8, 9, 10]


@torch.no_grad()
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("position_embedding", ["rope", "none"])
@each_model()
def test_documents_are_isolated_bit_for_bit(
    variant, position_embedding, attn_implementation, plain_flex_attention
):
    model = cat_model(
        **variant,
        position_embedding=position_embedding,
        attn_implementation=attn_implementation,
    )
    ids = random_ids(2, 60)
    document_ids = torch.zeros(2, 60, dtype=torch.long)
    document_ids[0, 25:], document_ids[1, 40:] = 5, 1
    changed = ids.clone()
    changed[0, 24], changed[1, 39] = 1 + ids[0, 24] % 96, 1 + ids[1, 39] % 96
    before = model(ids, document_ids=document_ids).logits
    after = model(changed, document_ids=document_ids).logits
    assert torch.equal(before[0, 25:], after[0, 25:])
    assert torch.equal(before[1, 40:], after[1, 40:])
    assert not torch.equal(before[0, 24], after[0, 24])
    mixed = model(ids).logits, model(changed).logits
    assert not torch.equal(mixed[0][0, 25:], mixed[1][0, 25:])


@torch.no_grad()
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa", "flex_attention"])
@each_model()
def test_a_packed_document_equals_the_document_alone(
    variant, attn_implementation, plain_flex_attention
):
    model = cat_model(**variant, attn_implementation=attn_implementation)
    first, second, third = random_ids(1, 25), random_ids(1, 1, seed=1), random_ids(1, 30, seed=2)
    packed = torch.cat([first, second, third], dim=1)
    document_ids = torch.tensor([[0] * 25 + [1] + [0] * 30])  # an id may come back
    logits = model(packed, document_ids=document_ids).logits.split([25, 1, 30], dim=1)
    for ours, document in zip(logits, (first, second, third), strict=True):
        torch.testing.assert_close(ours, model(document).logits, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@each_model()
def test_restarting_positions_isolate_as_document_ids_do(variant):
    """transformers isolates attention on restarting positions; the convolution must agree."""
    model = cat_model(**variant)
    ids = random_ids(2, 40)
    document_ids = torch.zeros(2, 40, dtype=torch.long)
    document_ids[0, 13:] = 1
    positions = torch.arange(40).repeat(2, 1)
    positions[0, 13:] -= 13
    by_positions = model(ids, position_ids=positions, use_cache=False).logits
    assert torch.equal(by_positions, model(ids, document_ids=document_ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("side", ["left", "right"])
@each_model()
def test_padding_changes_nothing_at_real_tokens(
    variant, side, attn_implementation, plain_flex_attention
):
    model = cat_model(**variant, attn_implementation=attn_implementation)
    lengths = [40, 33, 7, 1]
    rows = [random_ids(1, length, seed=length) for length in lengths]
    ids = torch.zeros(4, 40, dtype=torch.long)
    mask = torch.zeros(4, 40, dtype=torch.long)
    spans = [slice(40 - length, 40) if side == "left" else slice(0, length) for length in lengths]
    for row, (span, tokens) in enumerate(zip(spans, rows, strict=True)):
        ids[row, span], mask[row, span] = tokens, 1
    batch = model(ids, attention_mask=mask).logits
    for row, (span, tokens) in enumerate(zip(spans, rows, strict=True)):
        alone = model(tokens).logits[0]
        torch.testing.assert_close(batch[row, span], alone, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@each_model()
def test_padding_tokens_are_not_read(variant):
    model = cat_model(**variant)
    ids = random_ids(1, 30)
    mask = torch.ones(1, 30, dtype=torch.long)
    mask[:, :10] = 0
    other = ids.clone()
    other[:, :10] = random_ids(1, 10, seed=9)
    first, second = (model(tokens, attention_mask=mask).logits for tokens in (ids, other))
    assert torch.equal(first[:, 10:], second[:, 10:])


@torch.no_grad()
@each_model()
def test_padding_and_documents_together(variant):
    model = cat_model(**variant)
    tokens = random_ids(1, 30)
    ids = torch.cat([torch.zeros(1, 6, dtype=torch.long), tokens], dim=1)
    mask = (torch.arange(36) >= 6).long()[None]
    document_ids = torch.tensor([[0] * 6 + [0] * 12 + [1] * 18])
    padded = model(ids, attention_mask=mask, document_ids=document_ids).logits[:, 6:]
    for ours, document in zip(padded.split([12, 18], 1), tokens.split([12, 18], 1), strict=True):
        torch.testing.assert_close(ours, model(document).logits, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_isolated_is_refused():
    model = cat_model()
    ids = random_ids(1, 10)
    with pytest.raises(ValueError, match="prepared attention mask"):
        model(ids, attention_mask=torch.ones(1, 1, 10, 10).tril().bool())
    with pytest.raises(ValueError, match="document_ids cannot be used with a cache"):
        model(ids, document_ids=torch.arange(10)[None] // 6, use_cache=True)
    for positions in (None, torch.tensor([[*range(6), *range(4)]])):
        for lengths in ([0, 4, 10], [0, 4]):
            with pytest.raises(ValueError, match=r"cu_seq_lens_q: .* document_ids"):
                model(ids, position_ids=positions, cu_seq_lens_q=torch.tensor(lengths))
    assert model(ids, position_ids=positions).past_key_values is None


def test_flash_attention_gets_the_documents_lengths():
    """Rows are joined end to end; every row and every document starts a sequence."""
    config = cat_model().config
    config._attn_implementation_internal = "flash_attention_2"
    document_ids = torch.tensor([[0, 0, 0, 1, 1], [4, 4, 4, 4, 4]])
    layout = sequence_layout(config, torch.zeros(2, 5, 32), None, None, document_ids, None)
    assert layout.attention_kwargs["cu_seq_lens_q"].tolist() == [0, 3, 5, 10]
    assert layout.attention_kwargs["cu_seq_lens_k"].dtype == torch.int32
    assert layout.attention_kwargs["max_length_k"] == 5
    assert layout.position_ids.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]
    assert layout.attention_mask is None
