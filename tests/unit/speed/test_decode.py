"""eval.speed decode: with a cache and without, cold and warm, after long contexts."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from eval.speed import __main__ as run
from eval.speed import choices, decode, models
from tests.unit.speed.calls import TINY

MODELS = choices.models()


def test_decode_record(speed):
    arguments = ("--prompts", "5,9", "--new-tokens", 4, "--uncached-tokens", 2, "--repeats", 2)
    code, record, out, err = speed("decode", *TINY, *arguments, "--batch-size", 2)
    assert code == 0, err
    places = [(row["name"], row["case"]["prompt_tokens"]) for row in record["results"]]
    decoded = tuple(MODELS)[: tuple(MODELS).index("stock")]
    assert places == [(name, prompt) for name in decoded for prompt in (5, 9)]
    cold = [row["cold_prompt_tokens"] for row in record["results"]]
    assert cold == list(range(13, 13 + 4 * len(cold), 4))
    for row in record["results"]:
        assert len(row["tokens_per_second_cold"]["all"]) == 1
        cached, uncached = row["tokens_per_second_cached"], row["tokens_per_second_uncached"]
        for measured in (cached, uncached, row["prompt_seconds"]):
            assert len(measured["all"]) == 2
        assert row["cache_speedup"] == pytest.approx(cached["median"] / uncached["median"])
        assert row["near_ties"] == 0
        if row["case"]["prompt_tokens"] == 5:
            shortest, ratio = cached["all"], row["of_shortest_prompt"]
            assert ratio is None
        else:
            ratio = row["of_shortest_prompt"]["all"]
            assert ratio == [own / rival for own in cached["all"] for rival in shortest]
            assert f"{row['of_shortest_prompt']['median']:.2f} (" in out
        assert MODELS[row["name"]].label in out


def test_every_length_of_keys_is_cold_once(monkeypatch):
    """What is decoded as cold has lengths that nothing before it had, in any model."""
    met, cold = set(), []

    def lengths(model, prompt, count):
        new = set(range(prompt.shape[1], prompt.shape[1] + count))
        cold.append(not met & new)
        met.update(new)
        return decode.Decoded(prompt[:, :count], 1.0, 1.0)

    monkeypatch.setattr(decode, "decode_cached", lengths)
    monkeypatch.setattr(decode, "decode_uncached", lambda model, prompt, count: 1.0)
    monkeypatch.setattr(
        decode,
        "check",
        lambda model, prompt, case, name: lengths(model, prompt, case.cached_tokens) and 0,
    )
    size = models.ModelSize(1, 32, 2, 61, 3, "float32", "cpu")
    cases = [decode.DecodeCase(size, 1, prompt, 5, 3) for prompt in (8, 20)]
    decode.decode_speed(cases, ("pythia", "cat"), repeats=1)
    # The check, the cold prompt, a repeat: of two models and two prompts.
    assert cold == [True, True, False] * 2 + [False, True, False] * 2


def test_decoding_is_transformers_greedy():
    size = models.ModelSize(2, 32, 2, 61, 4, "float32", "cpu")
    model = models.build(size, "mh_cat", 32).eval()
    models.randomize_filters(model)
    prompt = models.random_ids(size, 2, 9)
    with torch.no_grad():
        tokens = decode.decode_cached(model, prompt, 6).tokens
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False, use_cache=False)
    assert torch.equal(tokens, expected[:, 9:])


def test_wrong_cache_is_not_timed(speed, monkeypatch):
    from cat_lm.model.cache import StateDynamicLayer

    exchange = StateDynamicLayer.exchange_inputs

    def forgetful(self, *arguments, **options):
        return 20.0 + exchange(self, *arguments, **options)

    monkeypatch.setattr(StateDynamicLayer, "exchange_inputs", forgetful)
    monkeypatch.setattr(decode, "decode_uncached", lambda *_: pytest.fail("timed"))
    arguments = ("--models", "cat", "--prompts", 12, "--new-tokens", 12)
    code, record, out, err = speed("decode", *TINY, *arguments)
    assert (code, record, out) == (2, None, "")
    assert "greedy tokens after a prompt of 12 differ" in err.splitlines()[-1]


@pytest.mark.parametrize("name", ["cat", "cat_ssm", "llama"])
def test_contexts_record(speed, name):
    """One cache serves all, and is as long after the measurement as before."""
    arguments = ("--contexts", "40,77", "--block", 4, "--top-k", 2, "--local", 1, "--repeats", 2)
    code, record, out, err = speed(
        "decode", *TINY, *arguments, "--models", name, "--new-tokens", 9, "--batch-size", 2
    )
    assert code == 0, err
    assert record["cache"] == "random" and "keys and values are random" in out
    assert [row["case"]["context"] for row in record["contexts"]] == [40, 77]
    for row in record["contexts"]:
        keys, landmarks = row["case"]["context"], row["case"]["context"] // 4
        token = 2 * 32 * 4  # rows, channels, bytes
        read = {"dense": 2 * keys * token, "landmark": (landmarks + 2 * 3 * 4) * token}
        assert row["layer_bytes"] == read
        for part in (row["layer"], row["model"]):
            seconds = {name: values["all"] for name, values in part["seconds"].items()}
            assert set(seconds) == {"dense", "landmark"}
            pairs = zip(seconds["dense"], seconds["landmark"], strict=True)
            ratios = [dense / own for dense, own in pairs]
            assert part["times_as_fast"]["all"] == pytest.approx(ratios) and len(ratios) == 2


def test_contexts_are_on_the_cpu_where_no_device_is_named():
    for device, given, expected in (
        ("auto", [40], "cpu"),
        ("cuda", [40], "cuda"),  # which is refused, as what was asked for
        ("auto", None, "auto"),
    ):
        assert run._device_name(Namespace(device=device, contexts=given)) == expected
    assert run._device_name(Namespace(device="auto")) == "auto"


@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("context", [5, 40])
def test_contexts_without_landmarks(speed, context, top_k):
    """Of a context shorter than a block, or with no block to choose, the keys near are read."""
    arguments = ("--block", 8, "--top-k", top_k, "--local", 1, "--repeats", 1, "--new-tokens", 2)
    code, record, _, err = speed(
        "decode", *TINY, *arguments, "--contexts", context, "--models", "cat"
    )
    assert code == 0, err
    assert [row["case"]["context"] for row in record["contexts"]] == [context]


def test_wrong_landmark_attention_is_not_timed(speed, monkeypatch):
    from eval.speed import contexts

    attend = contexts._attend
    monkeypatch.setattr(contexts, "_attend", lambda *given: attend(*given) + 0.01)
    monkeypatch.setattr(contexts, "_compared", lambda *_: pytest.fail("timed"))
    arguments = ("--contexts", "40", "--models", "cat", "--block", 4)
    code, record, out, err = speed("decode", *TINY, *arguments)
    assert (code, record, out) == (2, None, "")
    assert "landmark attention after 40 tokens differs by 0.01" in err.splitlines()[-1]
