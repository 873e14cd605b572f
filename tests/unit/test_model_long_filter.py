"""Long filters in models: exact sequences and decoding, starts, and what is refused."""

from __future__ import annotations

import pytest
import torch

from cat_lm import architectures
from cat_lm.model.hf.inspection import describe_backend
from cat_lm.ops.long_filter import chunks, filters
from cat_lm.pretrained.loading import load_model
from cat_lm.upcycle import Convolution, upcycle
from eval.common.filters import read_filters
from tests.unit.long_filters import random_numbers
from tests.unit.tiny_models import cat_model, random_ids, stock_model

SSM = {"conv_type": "head", "conv_filter": "ssm", "conv_state": 6}
EXPONENTIAL = {"conv_type": "head", "conv_filter": "exponential", "conv_state": 3}
GROUPED = {"family": "llama", "num_key_value_heads": 2, "attention_bias": True}
MODELS = {
    "packed": SSM,
    "q and v, norm before, Canon": EXPONENTIAL
    | {"conv_streams": "vq", "qk_norm": "rms", "qk_norm_place": "before", "canon": "A"},
    "Llama, norm after": GROUPED | SSM | {"conv_streams": "kv", "qk_norm": "l2"},
}


def long_model(**fields):
    """A model whose filters reach over some 20 tokens."""
    model = cat_model(**fields)
    with torch.no_grad():
        for name, numbers in model.named_parameters():
            if name.endswith(("q_filter", "k_filter", "v_filter")):
                kind, state = model.config.conv_filter, model.config.conv_state
                numbers.copy_(random_numbers(kind, len(numbers), state))
    return model


def convolution_of(model):
    layer = model.base_model.layers[0]
    return (getattr(layer, "self_attn", None) or layer.attention).convolution


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_words_count_the_state(fields):
    model = cat_model(**fields)
    family = architectures.of_config(model.config)
    section = architectures.section_of(model.config)
    assert family.summary(section).facts["conv_window"] is None
    said = f"{section.conv_filter} filters of state N={section.conv_state}"
    assert said in family.summary(section).words and "W=21" not in family.summary(section).words
    assert family.summary(section).sizes["filter state"] == section.conv_state
    said = describe_backend(model.config, "cpu", torch.float32)
    assert said.startswith(f"{section.conv_filter} filters of ") and "reference, the fast" in said


@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_a_plain_model_gets_them_and_computes_the_same(family, tmp_path):
    stock_model(family=family).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    convolution = Convolution("head", filter="ssm", state=6)
    out, difference = upcycle(tmp_path / "plain", tmp_path / "long", convolution)
    assert difference == 0
    model = load_model(out, device="cpu").train()
    assert (model.config.conv_filter, model.config.conv_state) == ("ssm", 6)
    model(random_ids(2, 20), labels=random_ids(2, 20)).loss.backward()
    gradient = convolution_of(model).q_filter.grad
    # First what is summed, then how; but the first pair, which does not turn, is one number.
    assert gradient[:, [-7, -6, -5, -3, -2, -1]].all() and not gradient[:, :-7].any()
    back, _ = upcycle(out, tmp_path / "back", Convolution("none"))
    assert load_model(back, device="cpu").config.model_type == family


def test_a_page_shows_their_first_taps(tmp_path):
    model = long_model(**SSM)
    model.save_pretrained(tmp_path)
    found = read_filters(tmp_path)
    modes = filters.get("ssm").modes_of(convolution_of(model).v_filter.detach(), 6)
    assert found.conv_type == "head" and found.streams["v"].shape == (2, 4, 64)
    expected = chunks.taps_of(modes, 64)
    torch.testing.assert_close(torch.from_numpy(found.streams["v"][0]), expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"conv_state": 4}, "conv_state=4: says nothing with conv_filter=taps; choose conv_filter"),
        (SSM | {"conv_state": 0}, "conv_filter=ssm: needs conv_state, .* as in conv_state=16"),
        (SSM | {"conv_state": 5}, "conv_state=5: must be even"),
        (SSM | {"conv_state": -2}, "conv_state=-2: must be from 0"),
        (SSM | {"conv_window": 4}, "conv_window=4: is for taps, and conv_filter=ssm has none"),
        (SSM | {"conv_rank": 2}, "conv_rank=2: needs .* filters of taps"),
        (SSM | {"conv_norm": "l1"}, "conv_norm=l1: there are no filters of taps"),
        (SSM | {"conv_type": "none"}, "needs conv_type=head, not conv_type=none"),
        (SSM | {"conv_type": "multihead"}, "needs conv_type=head, not conv_type=multihead"),
        (SSM | {"conv_filter": "fft"}, "conv_filter='fft': must be one of taps"),
    ],
)
def test_what_does_not_go_together_is_one_line(fields, message):
    with pytest.raises(ValueError, match=message) as raised:
        cat_model(**fields)
    assert "\n" not in str(raised.value)


def test_drafting_is_refused_before_a_token_is_made():
    """By a model that drafts, one that checks drafts, and one that drafts off its own text."""
    long, taps, ids = long_model(**SSM), cat_model(), random_ids(1, 9)
    refused = [
        (long, {"assistant_model": taps}, "not supported with stateful models"),
        (long, {"prompt_lookup_num_tokens": 3}, "not supported with stateful models"),
        (taps, {"assistant_model": long}, "cannot draft tokens for another model"),
    ]
    made = []
    long.register_forward_pre_hook(lambda *_: made.append(1))
    for model, how, words in refused:
        with pytest.raises(ValueError, match=words):
            model.generate(ids, max_new_tokens=9, do_sample=False, **how)
    assert not made
    assert long.generate(ids, max_new_tokens=3, num_beams=2).shape == (1, 12)


def test_a_window_beyond_the_context_is_no_matter():
    family = architectures.get("gpt_neox")
    section = architectures.section_of(cat_model(**SSM).config)
    assert family.problems(section, 16) == []
