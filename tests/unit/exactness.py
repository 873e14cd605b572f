"""Whatever a model is made of: causal, documents apart, padding unread, decoding exact."""

from __future__ import annotations

import torch
from transformers import DynamicCache, StaticCache

from tests.unit import test_model_decode as decoding
from tests.unit import test_model_edges as edges
from tests.unit.tiny_models import cat_model, random_ids


def check_sequences(variant, implementation="sdpa"):
    """Compare packed and padded rows with the same texts alone."""
    edges.check_causality(cat_model(**variant, attn_implementation=implementation))
    edges.test_documents_are_isolated_bit_for_bit(variant, "rope", implementation, None)
    edges.test_a_packed_document_equals_the_document_alone(variant, implementation, None)
    edges.test_padding_and_documents_together(variant)
    edges.test_padding_tokens_are_not_read(variant)
    for side in ("left", "right"):
        edges.test_padding_changes_nothing_at_real_tokens(variant, side, implementation, None)


def check_decoding(variant, total=40):
    """Compare steps, chunks, caches, padded prompts and beams with one pass over everything."""
    model, ids = cat_model(**variant), random_ids(2, total)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        for cache in (
            None,
            DynamicCache(config=model.config),
            StaticCache(config=model.config, max_cache_len=50),
        ):
            for plan in ([7, 1, 3, total - 11], [1] * 12 + [total - 12]):
                if cache is not None:
                    cache.reset()
                logits, _ = decoding.decode(model, ids, plan, cache)
                torch.testing.assert_close(logits, whole, **decoding.CLOSE)
    for side in ("left", "right"):
        decoding.test_padded_prompts_continue_as_if_alone(variant, side, "dynamic")
    decoding.test_padded_prompts_continue_as_if_alone(variant, "right", "static")
    prompt = random_ids(1, 9)
    beams = decoding.generate(model, prompt, num_beams=3)
    assert torch.equal(beams, decoding.generate(model, prompt, num_beams=3, use_cache=False))
