"""eval.speed decode: with a cache and without, cold and warm."""

from __future__ import annotations

import pytest
import torch

from eval.speed import choices, decode, models

MODELS = choices.models()


def test_record_has_every_model_after_every_prompt(speed):
    words = ("--prompts", "5,9", "--new-tokens", 4, "--uncached-tokens", 2, "--repeats", 2)
    code, record, out, err = speed("decode", *words, "--batch-size", 2)
    assert code == 0, err
    places = [(row["name"], row["case"]["prompt_tokens"]) for row in record["results"]]
    decoded = tuple(MODELS)[: tuple(MODELS).index("stock")]
    assert places == [(name, prompt) for name in decoded for prompt in (5, 9)]
    cold = [row["cold_prompt_tokens"] for row in record["results"]]
    assert cold == list(range(13, 13 + 4 * len(cold), 4))
    for row in record["results"]:
        cached, uncached = row["tokens_per_second_cached"], row["tokens_per_second_uncached"]
        assert len(cached["all"]) == len(uncached["all"]) == len(row["prompt_seconds"]["all"]) == 2
        assert row["cache_speedup"] == pytest.approx(cached["median"] / uncached["median"])
        assert row["near_ties"] == 0 and len(row["tokens_per_second_cold"]["all"]) == 1
        assert MODELS[row["name"]].label in out
        if row["case"]["prompt_tokens"] == 5:
            shortest = cached["all"]
            assert row["of_shortest_prompt"] is None
        else:
            ratio = row["of_shortest_prompt"]["all"]
            assert ratio == [own / rival for own in cached["all"] for rival in shortest]


def test_every_length_of_keys_is_cold_once():
    size = models.ModelSize(1, 32, 2, 61, 3, "float32", "cpu")
    cases = [decode.DecodeCase(size, 1, prompt, 5, 3) for prompt in (8, 20)]
    met = {length for case in cases for length in case.lengths_after(case.prompt_tokens)}
    for case, start in zip(cases * 2, decode.cold_prompts(cases, 2), strict=True):
        lengths = set(case.lengths_after(start))
        assert not met & lengths and start >= case.prompt_tokens
        met |= lengths


def test_decoding_is_transformers_greedy():
    size = models.ModelSize(2, 32, 2, 61, 4, "float32", "cpu")
    model = models.build(size, "mh_cat", 32).eval()
    models.randomize_filters(model)
    prompt = models.random_ids(size, 2, 9)
    with torch.no_grad():
        tokens, *_ = decode.decode_cached(model, prompt, 6)
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False, use_cache=False)
    assert torch.equal(tokens, expected[:, 9:])


def test_wrong_cache_is_not_timed(speed, monkeypatch):
    from cat_lm.model.cache import StateDynamicLayer

    exchange = StateDynamicLayer.exchange_inputs

    def forgetful(self, *arguments, **options):
        return 20.0 + exchange(self, *arguments, **options)

    monkeypatch.setattr(StateDynamicLayer, "exchange_inputs", forgetful)
    monkeypatch.setattr(decode, "decode_uncached", lambda *_: pytest.fail("timed"))
    words = ("--models", "cat", "--prompts", 12, "--new-tokens", 12)
    code, record, out, err = speed("decode", *words)
    assert (code, record, out) == (2, None, "")
    assert "greedy tokens after a prompt of 12 differ" in err.splitlines()[-1]
