"""Normalised queries, keys and filters: what they compute, where, and what is refused."""

import math

import pytest
import torch

from cat_lm import architectures
from cat_lm.core.errors import UserError
from cat_lm.ops.convolution import kinds
from cat_lm.pretrained.conversion import library_model
from eval.common.filters import read_filters
from eval.language.attention import attention_statistics
from tests.unit.tiny_models import cat_model, random_ids

NONE = {"conv_type": "none"}
LLAMA = {"family": "llama", "num_key_value_heads": 2, "attention_bias": True}
BEFORE = {"qk_norm_place": "before", "conv_window": 5}
MODELS = {
    "none, l2": NONE | {"qk_norm": "l2"},
    "head, l2": {"qk_norm": "l2", "conv_window": 5},
    "head, rms before": {"qk_norm": "rms", "conv_streams": "k"} | BEFORE,
    "maps, rms": {"conv_type": "multihead", "conv_mixing": "maps", "qk_norm": "rms"},
    "l1": {"conv_norm": "l1", "conv_type": "multihead", "conv_window": 3},
    "Llama, none, rms": LLAMA | NONE | {"qk_norm": "rms"},
    "Llama, depthwise, l2 before": LLAMA | {"conv_type": "depthwise", "qk_norm": "l2"} | BEFORE,
}
each_model = pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)


@pytest.mark.parametrize("kind", kinds.BUILT_IN)
def test_filters_of_norm_one(kind):
    model = cat_model(conv_type=kind, conv_norm="l1", conv_window=4)
    convolution = model.gpt_neox.layers[0].attention.convolution
    taps = convolution.taps("k")
    read = [n for n, axis in enumerate(kinds.get(kind).filter_axes) if axis in "WI"]
    torch.testing.assert_close(taps.abs().sum(read), torch.ones_like(taps.abs().sum(read)))
    doubled = cat_model(conv_type=kind, conv_norm="l1", conv_window=4)
    with torch.no_grad():
        for name, parameter in doubled.named_parameters():
            parameter *= 3 if name.endswith("_filter") else 1
        ids = random_ids(1, 9)
        torch.testing.assert_close(model(ids).logits, doubled(ids).logits, rtol=1e-4, atol=1e-5)
        convolution.k_filter.zero_()
        assert not convolution.taps("k").any() and model(ids).logits.isfinite().all()


def test_filters_are_read_as_they_are_used(tmp_path):
    model = cat_model(conv_norm="l1", conv_window=4)
    model.save_pretrained(tmp_path)
    taps = read_filters(tmp_path).streams["v"]
    expected = model.gpt_neox.layers[1].attention.convolution.taps("v").detach()
    torch.testing.assert_close(torch.as_tensor(taps[1]), expected)
    assert not torch.allclose(expected, model.gpt_neox.layers[1].attention.convolution.v_filter)


def test_filters_that_are_not_read_are_named(tmp_path):
    for fields, said in (
        ({}, ""),
        ({"conv_rank": 3}, "Not drawn: 2 more of q and of k in each head (conv_rank=3)."),
        ({"canon": "AC"}, "Not drawn: those of Canon layers (canon=AC)."),
    ):
        cat_model(**fields, conv_window=4).save_pretrained(tmp_path)
        assert read_filters(tmp_path).left_out == said


@each_model
def test_words_name_the_norms_and_the_library_has_none(fields):
    model = cat_model(**fields)
    family = architectures.of_config(model.config)
    section = architectures.section_of(model.config)
    words = family.summary(section).words
    assert ("norm of q and k" in words) == (section.qk_norm != "none")
    assert ("l1-normalised" in words) == (section.conv_norm == "l1")
    if section.qk_norm != "none" and section.conv_type == "none":
        with pytest.raises(
            UserError, match=f"--library: the model has qk_norm='{section.qk_norm}'"
        ):
            library_model(model)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"qk_norm": "l3"}, "qk_norm='l3': must be 'none', 'l2' or 'rms'"),
        ({"qk_norm": "l2", "qk_norm_place": "inside"}, "qk_norm_place='inside': must be 'after'"),
        ({"qk_norm_place": "before"}, "qk_norm_place=before: needs qk_norm"),
        (NONE | {"qk_norm": "l2", "qk_norm_place": "before"}, "a convolution of q or k"),
        ({"qk_norm": "l2", "conv_streams": "v"} | BEFORE, "a convolution of q or k"),
        (
            NONE | {"conv_norm": "l1"},
            "conv_norm=l1: there are no filters of taps",
        ),
        ({"conv_norm": "l2"}, "conv_norm='l2': must be 'none'"),
    ],
)
def test_what_says_nothing_is_one_line(fields, message):
    with pytest.raises(ValueError, match=message) as raised:
        cat_model(**fields)
    assert "\n" not in str(raised.value)


def test_a_norm_is_not_added_to_a_trained_model():
    family = architectures.get("llama")
    plain, normalised = (
        family.section_values(cat_model(family="llama", **NONE, qk_norm=norm).config)
        for norm in ("none", "rms")
    )
    assert family.differences(plain, normalised) == ["model.qk_norm is 'none' there and 'rms' here"]


class TestStatistics:
    def test_equal_logits_have_an_entropy_of_one(self):
        model = cat_model(**NONE)
        with torch.no_grad():
            for layer in model.gpt_neox.layers:
                layer.attention.query_key_value.weight.zero_()
                layer.attention.query_key_value.bias.zero_()
        found = attention_statistics(model, random_ids(20, 12))
        assert found["entropy"] == pytest.approx(1, abs=1e-5) and found["largest_logit"] == 0
        assert len(found["layers"]) == 2

    @pytest.mark.parametrize("fields", [NONE, LLAMA | NONE])
    def test_they_are_those_of_the_maps(self, fields):
        model = cat_model(**fields, attn_implementation="eager")
        ids = random_ids(3, 7)
        found = attention_statistics(model, ids)
        with torch.no_grad():
            maps = model(ids, output_attentions=True, use_cache=False).attentions[1]
        entropies = [
            -(maps[:, :, t, : t + 1] * maps[:, :, t, : t + 1].log()).sum(-1) / math.log(t + 1)
            for t in range(1, 7)
        ]
        expected = torch.stack(entropies).mean().item()
        assert found["layers"][1]["entropy"] == pytest.approx(expected, rel=1e-4)

    def test_l2_bounds_the_largest_logit(self):
        model = cat_model(qk_norm="l2")
        found = attention_statistics(model, random_ids(2, 12))
        assert 0 < found["largest_logit"] <= math.sqrt(8) * (1 + 1e-5)

    def test_other_attention_is_refused(self):
        model = cat_model(conv_type="multihead", conv_mixing="maps")
        with pytest.raises(UserError, match="softmax attention, not of mixed attention maps"):
            attention_statistics(model, random_ids(2, 12))
