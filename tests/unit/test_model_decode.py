"""Decoding: whatever the steps, the logits are those of the whole sequence; caches behave."""

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from cat_lm.model import CatCache
from cat_lm.model.attention.modules import map_mixing
from cat_lm.model.cache import LayerStateMixin
from tests.unit.tiny_models import VARIANTS, cat_model, each_kind, each_model, random_ids

CLOSE = {"rtol": 0, "atol": 1e-5}
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


def chunks_of(total, longest, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = []
    while sum(lengths) < total:
        length = int(torch.randint(1, longest + 1, (1,), generator=generator))
        lengths.append(min(length, total - sum(lengths)))
    return lengths


@torch.no_grad()
@each_model()
def test_steps_and_chunks_equal_the_whole(variant):
    check_decoding(cat_model(**variant, conv_window=4))


@torch.no_grad()
@pytest.mark.parametrize("window", [1, 2, 3, 21])
@each_kind(*SHORT)
def test_steps_and_chunks_at_other_windows(variant, window):
    """A state of nothing, of one token, and of most of the sequence."""
    check_decoding(cat_model(**variant, conv_window=window))


@torch.no_grad()
@pytest.mark.parametrize(
    "streams", ["qv", *(pytest.param(s, marks=pytest.mark.long) for s in "vk")]
)
@each_kind(*SHORT, without=("none",))
def test_steps_and_chunks_of_some_streams(variant, streams):
    if variant.get("conv_mixing") == "maps":
        streams = streams.replace("k", "kv")
    check_decoding(cat_model(**variant, conv_window=6, conv_streams=streams))


@torch.no_grad()
@pytest.mark.parametrize("attn_implementation", ["eager", "flex_attention"])
@each_kind(*SHORT)
def test_steps_and_chunks_on_other_attention_functions(
    variant, attn_implementation, plain_flex_attention
):
    check_decoding(cat_model(**variant, conv_window=6, attn_implementation=attn_implementation))


def check_decoding(model, total=36):
    ids = random_ids(2, total)
    whole = model(ids, use_cache=False).logits
    window = model.config.conv_window
    plans = [
        [1] * total,
        [10] + [1] * (total - 10),
        chunks_of(total, max(1, window - 2), 0),
        chunks_of(total, 30, 1),
    ]
    for plan in plans:
        logits, cache = decode(model, ids, plan)
        torch.testing.assert_close(logits, whole, **CLOSE)
        assert cache.get_seq_length() == total


@torch.no_grad()
def test_a_long_chunk_after_a_cache_is_mixed_in_blocks(monkeypatch):
    monkeypatch.setattr(map_mixing, "QUERY_BLOCK", 7)
    check_decoding(cat_model(**VARIANTS["maps"]))


@torch.no_grad()
@each_kind(*SHORT)
@pytest.mark.parametrize("position_embedding", ["rope", "none"])
def test_every_kind_of_cache(position_embedding, variant):
    model = cat_model(**variant, position_embedding=position_embedding)
    ids = random_ids(2, 40)
    whole = model(ids, use_cache=False).logits
    caches = [
        None,
        CatCache(model.config),
        DynamicCache(),
        DynamicCache(config=model.config),
        StaticCache(config=model.config, max_cache_len=50),
    ]
    for cache in caches:
        logits, _ = decode(model, ids, [7, 1, 3, 29], cache)
        torch.testing.assert_close(logits, whole, **CLOSE)


def check_plain_caches(model):
    """Decoding with transformers' own caches, in which nothing is changed."""
    ids = random_ids(2, 40)
    for cache in (DynamicCache(), StaticCache(config=model.config, max_cache_len=50)):
        with torch.no_grad():
            logits, _ = decode(model, ids, [7, 1, 3, 29], cache)
            torch.testing.assert_close(logits, model(ids, use_cache=False).logits, **CLOSE)
        assert not any(isinstance(layer, LayerStateMixin) for layer in cache.layers)


@each_kind(*SHORT)
def test_a_window_of_one_needs_no_convolution_state(variant):
    check_plain_caches(cat_model(**variant, conv_window=1))


def test_maps_mixed_by_values_alone_need_no_convolution_state():
    model = cat_model(**VARIANTS["maps"], conv_streams="v")
    ids = random_ids(2, 40)
    check_plain_caches(model)
    assistant = cat_model(**VARIANTS["maps"], conv_streams="v", seed=1)
    drafted = generate(model, ids[:1, :9], assistant_model=assistant)
    assert torch.equal(drafted, generate(model, ids[:1, :9], use_cache=False))


@torch.no_grad()
@each_kind(*SHORT)
def test_bfloat16_decoding(variant):
    model = cat_model(**variant).bfloat16()
    ids = random_ids(1, 40)
    whole = model(ids, use_cache=False).logits.float()
    logits, _ = decode(model, ids, [20] + [1] * 20)
    assert (logits.float() - whole).abs().max() < 0.05 * whole.abs().max()


def test_caches_that_cannot_serve_are_refused():
    model = cat_model()
    ids = random_ids(1, 8)
    filled = DynamicCache()
    for layer in range(2):
        filled.update(torch.zeros(1, 4, 5, 8), torch.zeros(1, 4, 5, 8), layer)
    with pytest.raises(ValueError, match="start from an empty cache"):
        model(ids, past_key_values=filled)
    sliding = DynamicCache(config=model.config)
    sliding.layers[0] = DynamicSlidingWindowLayer(4)
    with pytest.raises(ValueError, match="cannot hold convolution inputs"):
        model(ids, past_key_values=sliding)


@torch.no_grad()
@pytest.mark.parametrize("cache_type", ["dynamic", "static"])
@each_kind(*SHORT)
def test_reorder(variant, cache_type):
    model, ids = cat_model(**variant), random_ids(3, 30)
    cache = CatCache(model.config)
    if cache_type == "static":
        cache = StaticCache(config=model.config, max_cache_len=40)
    decode(model, ids[:, :20], [20], cache)
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    logits, _ = decode(model, ids[order, 20:], [1, 9], cache)
    torch.testing.assert_close(logits, model(ids[order]).logits[:, 20:], **CLOSE)


@torch.no_grad()
@each_kind(*SHORT)
def test_batch_selection_repetition_and_reset(variant):
    model, ids = cat_model(**variant), random_ids(3, 30)
    cache = CatCache(model.config)
    decode(model, ids[:, :20], [20], cache)
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    rows = ids[torch.tensor([2, 2, 0, 0])]
    logits, _ = decode(model, rows[:, 20:], [4, 6], cache)
    torch.testing.assert_close(logits, model(rows).logits[:, 20:], **CLOSE)
    cache.reset()
    logits, _ = decode(model, ids, [3, 27], cache)
    torch.testing.assert_close(logits, model(ids).logits, **CLOSE)


@torch.no_grad()
@each_kind(*SHORT, without=("none",))
def test_crop_with_and_without_recording(variant):
    model, ids = cat_model(**variant, conv_window=5), random_ids(1, 40)
    whole = model(ids).logits
    cache = CatCache(model.config)
    decode(model, ids[:, :10], [10], cache)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-1)

    cache = CatCache(model.config)
    decode(model, ids[:, :10], [10], cache)
    cache.activate_past_recording()
    for removed in (3, 0, 7):
        decode(model, random_ids(1, removed + 2, seed=removed), [removed + 2], cache)
        cache.crop(-(removed + 2))
        assert {kept.shape[1] for kept in cache.layers[0].inputs.values()} == {4}
    logits, _ = decode(model, ids[:, 10:], [1, 29], cache)
    torch.testing.assert_close(logits, whole[:, 10:], **CLOSE)


@torch.no_grad()
def test_crop_to_the_beginning():
    model, ids = cat_model(conv_window=5), random_ids(1, 12)
    cache = CatCache(model.config)
    decode(model, ids[:, :3], [3], cache)
    cache.crop(-2)
    logits, _ = decode(model, ids[:, 1:], [11], cache)
    torch.testing.assert_close(logits, model(ids).logits[:, 1:], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("cache_type", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["left", "right"])
@each_kind(*SHORT)
def test_padded_prompts_continue_as_if_alone(variant, side, cache_type):
    model = cat_model(**variant)
    lengths, steps = [12, 5, 1], 9
    rows = [random_ids(1, length + steps, seed=length) for length in lengths]
    ids = torch.zeros(3, 12 + steps, dtype=torch.long)
    mask = torch.ones(3, 12 + steps, dtype=torch.long)
    for row, (length, tokens) in enumerate(zip(lengths, rows, strict=True)):
        prompt = slice(12 - length, 12) if side == "left" else slice(0, length)
        mask[row, :12] = 0
        mask[row, prompt], ids[row, prompt] = 1, tokens[0, :length]
        ids[row, 12:] = tokens[0, length:]
    cache, outputs = None, []
    if cache_type == "static":
        cache = StaticCache(config=model.config, max_cache_len=30)
    for start, stop in ((0, 12), (12, 13), (13, 17), (17, 21)):
        output = model(
            ids[:, start:stop],
            attention_mask=mask[:, :stop],
            past_key_values=cache,
            use_cache=True,
        )
        cache = output.past_key_values
        outputs.append(output.logits)
    assert all(logits.isfinite().all() for logits in outputs)  # at padding too
    continued = torch.cat(outputs, dim=1)[:, 12:]
    for row, (length, tokens) in enumerate(zip(lengths, rows, strict=True)):
        torch.testing.assert_close(continued[row], model(tokens).logits[0, length:], **CLOSE)


def generate(model, ids, **kwargs):
    torch.manual_seed(0)
    return model.generate(ids, max_new_tokens=12, do_sample=False, **kwargs)


@each_kind(*SHORT)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=["greedy", "beam", "beams", "lookup"],
)
def test_generate_with_and_without_cache(how, variant):
    model = cat_model(**variant, conv_window=6)
    ids = random_ids(1, 9)
    cached = generate(model, ids, **how)
    greedy = {name: value for name, value in how.items() if name != "prompt_lookup_num_tokens"}
    assert torch.equal(cached, generate(model, ids, use_cache=False, **greedy))


@each_kind(*SHORT)
def test_generate_by_sampling(variant):
    model, ids = cat_model(**variant), random_ids(2, 9)
    samples = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        samples.append(model.generate(ids, max_new_tokens=15, do_sample=True, use_cache=use_cache))
    assert torch.equal(*samples)


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


@pytest.mark.parametrize("cache_implementation", [None, "static"])
@pytest.mark.parametrize("num_beams", [1, 3])
@each_kind(*SHORT)
def test_generate_a_left_padded_batch(variant, num_beams, cache_implementation):
    model = cat_model(**variant)
    lengths = [12, 7, 1]
    rows = [random_ids(1, length, seed=length) for length in lengths]
    ids = torch.zeros(3, 12, dtype=torch.long)
    mask = torch.zeros(3, 12, dtype=torch.long)
    for row, (length, tokens) in enumerate(zip(lengths, rows, strict=True)):
        ids[row, 12 - length :], mask[row, 12 - length :] = tokens, 1
    how = {"num_beams": num_beams, "cache_implementation": cache_implementation}
    batch = generate(model, ids, attention_mask=mask, **how)
    for row, tokens in enumerate(rows):
        alone = generate(model, tokens, num_beams=num_beams, use_cache=False)
        assert torch.equal(batch[row, 12:], alone[0, tokens.shape[1] :])
