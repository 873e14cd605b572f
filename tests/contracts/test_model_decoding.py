"""Contracts of decoding: whatever the parts and the cache, the logits are those of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from cat_lm.model.cache import RecurrentLayer
from tests.contracts.models import DECODERS, OTHERS, build, close, each, every_case, tokens

# Flex attention with a static cache is wrong in transformers too; `generate` refuses it.
STATIC = [case for case in DECODERS if case.fields["attn_implementation"] != "flex_attention"]
# Token by token from the first on, and parts shorter and longer than filters, chunks and blocks.
PLANS = ([*[1] * 9, 16], [7, 1, 3, 2, 12])


def decode(
    model: nn.Module, ids: Tensor, lengths: list[int], cache=None, mask=None
) -> tuple[Tensor, object]:
    """Return the logits of ids [B, T] fed in parts, and the cache."""
    found, start = [], 0
    for length in lengths:
        stop = start + length
        given = (
            {}
            if mask is None
            else {"attention_mask": mask[:, : mask.shape[1] - ids.shape[1] + stop]}
        )
        output = model(ids[:, start:stop], past_key_values=cache, use_cache=True, **given)
        cache, start = output.past_key_values, stop
        found.append(output.logits)
    return torch.cat(found, dim=1), cache


@torch.no_grad()
@every_case
def test_parts_equal_the_whole(case):
    model, ids = build(case), tokens(2, 25)
    whole = model(ids, use_cache=False).logits
    for plan in PLANS:
        found, cache = decode(model, ids, plan)
        close(found, whole)
        assert cache.get_seq_length() == 25


@torch.no_grad()
@each([*DECODERS[::5], *OTHERS[::2]])
def test_long_rows_equal_their_parts(case):
    """Logits are computed for 128 queries at a time, recurrences for 64 tokens."""
    model = build(case, max_position_embeddings=320) if case in DECODERS else build(case)
    ids = tokens(1, 300 if "learned" not in case.name else 60)
    found, _ = decode(model, ids, [50, 1, ids.shape[1] - 51])
    close(found, model(ids, use_cache=False).logits)


@torch.no_grad()
@every_case
def test_every_class_of_cache_serves_and_is_reset(case):
    model, ids = build(case), tokens(2, 25)
    whole = model(ids, use_cache=False).logits
    caches = [DynamicCache()]
    if case in DECODERS:
        caches.append(DynamicCache(config=model.config))
    if case in STATIC:
        caches.append(StaticCache(config=model.config, max_cache_len=30))
    for cache in caches:
        # Nothing of another text may be left after the reset.
        decode(model, tokens(2, 9, seed=4), [9], cache)
        addresses = [x.data_ptr() for layer in cache.layers for x in states_of(layer)]
        cache.reset()
        found, _ = decode(model, ids, PLANS[1], cache)
        close(found, whole)
    # A captured graph reads a static cache where it was.
    kept = [x.data_ptr() for layer in cache.layers for x in states_of(layer)]
    assert case not in STATIC or kept == addresses


def states_of(layer) -> list[Tensor]:
    named = [*getattr(layer, "inputs", {}).values(), *getattr(layer, "recurrent", {}).values()]
    return [x for x in (layer.keys, layer.values, *named) if x is not None]


@torch.no_grad()
@every_case
def test_rows_of_a_cache_are_reordered_repeated_and_chosen(case):
    model, ids = build(case), tokens(3, 24)
    _, cache = decode(model, ids[:, :14], [14])
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 2, 5]))
    rows = ids[[2, 0, 0]]
    found, _ = decode(model, rows[:, 14:], [1, 9], cache)
    close(found, model(rows).logits[:, 14:])


@torch.no_grad()
@each(STATIC)
def test_rows_of_a_static_cache_are_reordered(case):
    model, ids = build(case), tokens(3, 20)
    cache = StaticCache(config=model.config, max_cache_len=24)
    decode(model, ids[:, :13], [13], cache)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    rows = ids[[2, 0, 0]]
    found, _ = decode(model, rows[:, 13:], [1, 6], cache)
    close(found, model(rows).logits[:, 13:])


@torch.no_grad()
@every_case
def test_drafted_tokens_are_taken_back(case):
    """But of recurrences and filters as long as the text, whose state cannot go back."""
    model, ids = build(case), tokens(1, 25)
    _, cache = decode(model, ids[:, :10], [10])
    if isinstance(cache.layers[0], RecurrentLayer):
        with pytest.raises(RuntimeError, match="cannot remove 2 tokens"):
            cache.crop(-2)
        return
    cache.activate_past_recording()
    for removed in (3, 1, 7):
        decode(model, tokens(1, removed + 1, seed=removed), [removed + 1], cache)
        if case.fields.get("conv_filter", "taps") != "taps":
            with pytest.raises(RuntimeError, match="cannot go back"):
                cache.crop(-(removed + 1))
            return
        cache.crop(-(removed + 1))
    found, _ = decode(model, ids[:, 10:], [1, 14], cache)
    close(found, model(ids).logits[:, 10:])


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@every_case
def test_padded_prompts_go_on_as_if_alone(case, side):
    """Landmarks' blocks begin with the text, so that they take padding on the left alone."""
    model, steps, lengths = build(case), 6, (12, 5, 1)
    ids, mask = tokens(3, 12 + steps), torch.ones(3, 12 + steps, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, :12] = 0
        mask[row, slice(12 - length, 12) if side == "left" else slice(length)] = 1
    plan = [12, 1, 3, 2]
    if side == "right" and "landmark" in (case.fields.get("attention"), case.fields.get("mixer")):
        with pytest.raises(ValueError, match="tokens follow padding at the end of a row"):
            decode(model, ids, plan, mask=mask)
        return
    caches = [None]
    if case in STATIC:
        caches.append(StaticCache(config=model.config, max_cache_len=20))
    for cache in caches:
        found, _ = decode(model, ids, plan, cache, mask)
        assert found.isfinite().all()
        for row in range(3):
            real = mask[row].bool()
            close(found[row, real], model(ids[row : row + 1, real]).logits[0])


@torch.no_grad()
@every_case
def test_generation_with_a_cache_equals_without(case):
    """By three beams, of prompts padded on the left; with a cache each step reads one token."""
    model, ids = build(case), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[1, :4] = ids[1, :4] = 0
    how = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "num_beams": 3}
    how |= {"pad_token_id": 0, "eos_token_id": None}
    read = []
    watching = model.base_model.register_forward_pre_hook(
        lambda module, given, named: read.append(named.get("input_ids", *given[:1]).shape[1]),
        with_kwargs=True,
    )
    cached = model.generate(ids, **how)
    watching.remove()
    assert read == [9, *[1] * 3]
    assert torch.equal(cached, model.generate(ids, **how, use_cache=False))
    alone = model.generate(ids[1:, 4:], **how | {"attention_mask": mask[1:, 4:]})
    assert torch.equal(cached[1, 4:], alone[0])
    embedded = model.get_input_embeddings()(ids)
    assert torch.equal(model.generate(inputs_embeds=embedded, **how), cached[:, 9:])


@torch.no_grad()
@each(STATIC[::3])
def test_static_generation_equals_dynamic(case):
    model, how = build(case), {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    for padded in (False, True):
        ids = tokens(2, 9)
        mask = torch.ones_like(ids)
        if padded:
            mask[1, :4] = ids[1, :4] = 0
        found = model.generate(ids, attention_mask=mask, cache_implementation="static", **how)
        assert torch.equal(found, model.generate(ids, attention_mask=mask, **how))


@torch.no_grad()
@every_case
def test_half_precision_decodes_near_the_whole(case):
    model, ids = build(case).bfloat16(), tokens(1, 20)
    whole = model(ids, use_cache=False).logits.float()
    found, _ = decode(model, ids, [10, *[1] * 10])
    wrong = (found.float() - whole).abs() > 0.06 * whole.abs().max()
    # Rounding may make landmarks choose other blocks.
    assert wrong.float().mean() <= (0.3 if "landmark" in case.name else 0)


@torch.no_grad()
@every_case
def test_caches_that_cannot_serve_are_refused(case):
    model, ids = build(case), tokens(2, 8)
    filled = DynamicCache()
    groups = getattr(model.config, "num_key_value_heads", None) or 4
    width, ranks = getattr(model.config, "head_width", 4), getattr(model.config, "conv_rank", 1)
    for layer in range(2):
        filled.update(
            torch.zeros(2, groups, 5, ranks * width), torch.zeros(2, groups, 5, width), layer
        )
    if not model.config.needs_layer_state and case.fields["attention"] != "landmark":
        assert model(ids, past_key_values=filled).logits.isfinite().all()
        return
    with pytest.raises(ValueError, match=r"this cache holds keys and values|start from an empty"):
        model(ids, past_key_values=filled)
