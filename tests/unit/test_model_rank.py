"""Kernels of scores: rank R against the score map convolved by loops, and multi-token attention."""

import pytest
import torch

from cat_lm import architectures
from cat_lm.core.errors import UserError
from cat_lm.mixers import Setting, make_mixer
from cat_lm.model.context import Context
from cat_lm.model.streams.operations import RANK_START
from cat_lm.pretrained.loading import load_model
from cat_lm.upcycle import Convolution, upcycle
from tests.unit.tiny_models import cat_model, random_ids, stock_model

LLAMA = {"family": "llama", "num_key_value_heads": 2, "attention_bias": True}
RANK = {"conv_type": "head", "conv_window": 5, "conv_rank": 3}
RANKS = {
    "packed": RANK,
    "qk, norm before": RANK | {"conv_streams": "kq", "qk_norm": "rms", "qk_norm_place": "before"},
    "Llama": LLAMA | RANK,
}
TOKENS = {"attention": "multi_token", "attn_implementation": "eager"}
BOTH = {"query_window": 3, "key_window": 5, "head_mixing": "both"}
MULTI = {
    "plain": TOKENS | {"conv_type": "none", "attention_options": BOTH},
    "Llama, convolved": LLAMA | TOKENS | {"conv_type": "head", "conv_window": 4},
}


def multi_token(**fields):
    """A model whose kernels and weights between heads are random."""
    model = cat_model(**fields | {"attn_implementation": "eager"})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".core." in name:
                parameter.normal_(std=0.5)
    return model


def first_attention(model):
    layer = model.base_model.layers[0]
    return getattr(layer, "self_attn", None) or layer.attention


@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_it_starts_as_rank_one(family, tmp_path):
    stock_model(family=family).save_pretrained(tmp_path / "plain")
    convolution = Convolution("head", 5, streams="qk", rank=3)
    out, difference = upcycle(tmp_path / "plain", tmp_path / "ranked", convolution)
    assert difference <= 1e-5
    model = load_model(out, device="cpu")
    filters = first_attention(model).convolution
    assert not filters.k_rank_filter.any() and model.config.conv_rank == 3
    expected = torch.zeros(2, 4, 5)
    expected[0, :, 1] = expected[1, :, 2] = RANK_START
    assert torch.equal(filters.q_rank_filter, expected)
    loss = model.train()(random_ids(2, 20), labels=random_ids(2, 20)).loss
    loss.backward()
    assert (filters.k_rank_filter.grad[0] != filters.k_rank_filter.grad[1]).all(), "ranks differ"
    back, _ = upcycle(out, tmp_path / "back", Convolution("none"))
    assert load_model(back, device="cpu").config.model_type == family
    config = architectures.get(family).config_class()
    torch.manual_seed(0)
    drawn = type(model)(config(**model.config.to_dict() | {"conv_init": "uniform"}))
    assert torch.equal(first_attention(drawn).convolution.q_rank_filter, expected)


@pytest.mark.parametrize("fields", [*RANKS.values(), *MULTI.values()], ids=[*RANKS, *MULTI])
def test_words_name_the_ranks(fields):
    family = architectures.get(fields.get("family", "gpt_neox"))
    section = architectures.section_of(cat_model(**fields).config)
    if section.conv_rank == 1:
        assert "multi-token attention" in family.summary(section).words
        return
    assert "rank 3" in family.summary(section).words


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"conv_rank": 2, "conv_streams": "k"},
            "conv_rank=2: needs .* streams q and k",
        ),
        (
            {"conv_rank": 2, "conv_type": "depthwise"},
            "needs conv_type=head.* not .*=depthwise",
        ),
        ({"conv_rank": 2, "conv_type": "none"}, "needs conv_type=head"),
        (RANK | {"conv_rank": 6}, "conv_rank=6: is above conv_window=5; .* at most rank W"),
        (RANK | {"conv_rank": 0}, "conv_rank=0: must be from 1"),
        (RANK | TOKENS, "conv_rank=3: cannot be combined with multi-token attention"),
        (TOKENS | {"attn_implementation": "sdpa"}, "cannot compute multi-token attention"),
        (TOKENS | {"attention_options": {"key_window": 4}}, "attention_options.key_window=4: must"),
        (TOKENS | {"attention_options": {"head_mixing": "x"}}, "head_mixing='x': must be one of n"),
        (TOKENS | {"attention_options": {"query_window": True}}, "query_window=True: must be a wh"),
    ],
)
def test_what_does_not_go_together_is_one_line(fields, message):
    with pytest.raises(ValueError, match=message) as raised:
        cat_model(**fields)
    assert "\n" not in str(raised.value)


def test_flash_attention_takes_heads_of_256_channels():
    family = architectures.get("gpt_neox")
    section = architectures.section_of(cat_model(**RANK).config)
    wide = section.model_copy(
        update={"hidden_size": 512, "attn_implementation": "flash_attention_2", "conv_rank": 2}
    )
    assert family.problems(wide, 128) == []
    found = family.problems(wide.model_copy(update={"conv_rank": 3}), 128)
    assert found == [
        "conv_rank=3: makes heads of 384 channels, and attn_implementation=flash_attention_2 takes "
        "at most 256"
    ]


class TestMultiToken:
    def test_what_is_loaded_is_computed_by_what_can(self, tmp_path):
        model = multi_token(**MULTI["plain"])
        model.save_pretrained(tmp_path)
        loaded = load_model(tmp_path, device="cpu")  # config.json does not say what computes it
        assert loaded.config._attn_implementation == "eager"
        ids = random_ids(1, 9)
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
        plain = cat_model(conv_type="none", attn_implementation=None)
        assert plain.config._attn_implementation == "sdpa"

    def test_rows_beyond_512_are_one_line(self):
        model = cat_model(**MULTI["plain"], max_position_embeddings=1024)
        with pytest.raises(UserError, match="rows of at most 512 tokens, not of 513"):
            model(random_ids(1, 513))
        family = architectures.get("gpt_neox")
        section = architectures.section_of(model.config)
        assert section.attn_implementation == "eager"  # what upcycling says to train it with
        assert family.problems(section, 512) == []
        assert family.problems(section, 513) == [
            "attention=multi_token: reads rows of at most 512 tokens, not of 513"
        ]
        mixer = make_mixer("multi-token").build(Setting(4))
        with pytest.raises(UserError, match="attention=multi_token: reads rows of at most 512"):
            mixer(torch.zeros(1, 513, 4), Context())
