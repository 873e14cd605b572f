"""Caches that are cropped or refused, and drafted tokens that are taken back."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from cat_lm.model import CatCache
from tests.tiny_models import cat_model, each_kind, random_ids

# A filter per head, the mixing of maps, which keeps a state of its own, and the other family.
SHORT = ("head", "maps", "llama-multihead")


def decode(model, ids, lengths, cache=None, **kwargs):
    """Logits of `ids` fed in chunks of `lengths`."""
    outputs = []
    for chunk in ids.split(lengths, dim=1):
        output = model(chunk, past_key_values=cache, use_cache=True, **kwargs)
        cache = output.past_key_values
        outputs.append(output.logits)
    return torch.cat(outputs, dim=1), cache


def test_a_sliding_cache_is_refused():
    model, ids = cat_model(), random_ids(1, 8)
    sliding = DynamicCache(config=model.config)
    sliding.layers[0] = DynamicSlidingWindowLayer(4)
    with pytest.raises(ValueError, match="cannot hold states"):
        model(ids, past_key_values=sliding)


@torch.no_grad()
def test_crop_needs_a_recording_and_keeps_a_window():
    model, ids = cat_model(conv_window=5), random_ids(1, 12)
    cache = CatCache(model.config)
    decode(model, ids[:, :10], [10], cache)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-1)
    cache = CatCache(model.config)
    decode(model, ids[:, :10], [10], cache)
    cache.activate_past_recording()
    decode(model, ids, [12], cache)
    cache.crop(-12)
    assert {kept.shape[1] for kept in cache.layers[0].inputs.values()} == {4}


def generate(model, ids, **kwargs):
    torch.manual_seed(0)
    return model.generate(ids, max_new_tokens=12, do_sample=False, **kwargs)


@each_kind(*SHORT)
def test_generate_with_an_assistant(variant):
    """Assisted decoding drafts tokens and takes wrong ones back, out of both caches."""
    for seed in range(6):
        model, assistant = cat_model(**variant), cat_model(**variant)
        generator = torch.Generator().manual_seed(seed)
        for ours, theirs in zip(model.parameters(), assistant.parameters(), strict=True):
            # Sure of their next token, and not always of the same one.
            ours.data += 0.15 * torch.randn(ours.shape, generator=generator)
            theirs.data = ours.data + 0.02 * seed * torch.randn(ours.shape, generator=generator)
        # transformers takes a drafted token for padding where it is the padding token.
        model.generation_config.pad_token_id = assistant.generation_config.pad_token_id = None
        ids = random_ids(1, 11)
        drafted = generate(model, ids, min_new_tokens=12, assistant_model=assistant)
        expected = generate(model, ids, min_new_tokens=12, use_cache=False)
        assert torch.equal(drafted, expected)
