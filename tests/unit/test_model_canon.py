"""Canon layers: what they compute, where they stand, how they start, what they cost."""

import math

import pytest
import torch

from cat_lm import architectures
from cat_lm.core.errors import UserError
from cat_lm.pretrained.conversion import library_model
from cat_lm.pretrained.loading import load_model, model_config
from cat_lm.upcycle import Convolution, model_section, upcycle
from tests.unit import test_model_adapters as adapters
from tests.unit.tiny_models import cat_model, random_ids, stock_model

ACD = {"conv_type": "none", "canon": "ACD", "canon_window": 4}
LLAMA = {"family": "llama", "num_key_value_heads": 2, "canon": "DCA", "canon_window": 3}
MODELS = {
    "ACD": ACD,
    "CAT + ACD": {"conv_type": "head", "conv_window": 6, "canon": "ACD"},
    "sequential, A": ACD | {"canon": "A", "use_parallel_residual": False},
    "Llama, ABCD": LLAMA | {"conv_type": "depthwise", "conv_window": 4},
    "Llama, D": LLAMA | {"canon": "D", "conv_type": "none"},
}
each_model = pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)


def test_starts():
    fields = ACD | {"canon_window": 16}
    plain = cat_model(conv_type="none")
    kinds = architectures.get("gpt_neox").classes()

    def start(**changes):
        torch.manual_seed(0)
        return kinds.causal_lm(kinds.config(**plain.config.to_dict() | fields | changes))

    for layer in start().gpt_neox.layers:
        for place in "ACD":
            drawn = layer.canon[place].canon_filter
            assert drawn.abs().max() <= 1 / 4 and drawn.abs().max() > 0.2
    zero = start(canon_init="zero").eval()
    assert all(not p.any() for name, p in zero.named_parameters() if "canon" in name)
    plain = start(canon="none").eval()
    logits = plain(random_ids(2, 9)).logits
    torch.testing.assert_close(zero(random_ids(2, 9)).logits, logits, rtol=1e-5, atol=1e-6)
    residual = start(conv_type="depthwise", conv_init="residual", conv_window=4)
    for stream in "qkv":
        filters = getattr(residual.gpt_neox.layers[0].attention.convolution, f"{stream}_filter")
        rest = filters.detach().clone()
        rest[:, :, 0] -= 1
        assert 0.4 < rest.abs().max() <= 1 / math.sqrt(4) and rest[:, :, 0].abs().max() > 0.4


@each_model
def test_words_name_the_layers(fields):
    model = cat_model(**fields)
    family = architectures.of_config(model.config)
    section = architectures.section_of(model.config)
    plain = section.model_copy(update={"canon": "none"})
    assert "Canon" in family.summary(section).words and "Canon" not in family.summary(plain).words


@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_upcycled_there_and_back(family, tmp_path):
    stock_model(family=family).save_pretrained(tmp_path / "plain")
    out, _ = upcycle(tmp_path / "plain", tmp_path / "both", Convolution(canon="DA", canon_window=3))
    section = model_section(model_config(out))
    assert section["canon"] == "DA" and section["conv_type"] == "head"
    model = load_model(out, device="cpu")
    assert not any(layer.canon["D"].canon_filter.any() for layer in model.base_model.layers)
    canon_alone = Convolution("none", window=1000, canon="C")  # whose window says nothing
    out, _ = upcycle(out, tmp_path / "canon", canon_alone)
    assert list(load_model(out, device="cpu").base_model.layers[0].canon) == ["C"]
    back, _ = upcycle(out, tmp_path / "back", Convolution("none"))
    assert model_config(back).model_type == family
    changed = load_model(out, device="cpu")
    with torch.no_grad():
        changed.base_model.layers[1].canon["C"].canon_filter[0, 2, 1] = 0.25
    changed.save_pretrained(tmp_path / "changed")
    with pytest.raises(UserError, match=r"layers\.1\.canon\.C\.canon_filter is no longer the iden"):
        upcycle(tmp_path / "changed", tmp_path / "out", Convolution("none"))
    for wrong, message in ((("ABCD", 4), 'canon="ABCD": must'), (("A", 129), "canon_window=129")):
        with pytest.raises(UserError, match=message):
            convolution = Convolution(canon=wrong[0], canon_window=wrong[1])
            upcycle(tmp_path / "plain", tmp_path / "out", convolution)
    with pytest.raises(UserError, match="--library: the model has canon='C'; plain"):
        library_model(changed)


def test_what_a_run_may_not_change_when_it_goes_on():
    family = architectures.get("gpt_neox")
    plain, canon = (
        family.section_values(cat_model(conv_type="none", canon=places).config)
        for places in ("none", "A")
    )
    assert family.differences(plain, plain | {"canon_window": 9, "canon_init": "zero"}) == []
    assert family.differences(canon, canon | {"canon_init": "zero"}) == []
    assert family.differences(plain, canon) == [
        "model.canon is 'none' there and 'A' here",
        "python -m cat_lm.upcycle adds convolutions to a model",
    ]
    assert family.differences(canon, canon | {"canon_window": 9}) == [
        "model.canon_window is 4 there and 9 here"
    ]


def test_the_log_says_what_computes_them():
    family = architectures.get("llama")

    def said(**fields):
        config = cat_model(family="llama", **fields).config
        return family.describe_backend(
            "conv_backend", config, torch.device("cpu"), torch.float32, "reference"
        )

    assert said(conv_type="none") == "no convolutions"
    assert said(conv_type="none", canon="CA").startswith("Canon layers A, C (W=4): reference, ")
    both = said(conv_type="head", canon="D")
    assert "head convolution of q, k, v (W=21)" in both and "; Canon layers D (W=4)" in both
    model = cat_model(canon="D", conv_type="none")
    model.set_conv_backend("triton")  # which does not serve tensors on a CPU
    with pytest.raises(ValueError, match="backend='triton'"):
        model(random_ids(1, 9))


def test_lora_on_the_projections_of_every_part(tmp_path):
    fields = MODELS["Llama, ABCD"] | {"conv_type": "head", "conv_rank": 2, "qk_norm": "rms"}
    adapters.test_lora_trains_saves_reloads_and_merges(
        fields | {"qk_norm_place": "before"}, tmp_path
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("canon", "ABCD", "must be none or some of A, C and D, .*; B is conv_type=depthwise"),
        ("canon", "ACX", "must be none or some of A, C and D, each once, as in ACD"),
        ("canon", "AA", "each once"),
        ("canon", "", "must be none or some"),
        ("canon_init", "identity", "canon_init=.identity.: must be .uniform."),
        ("canon_window", 0, "canon_window=0: must be from 1"),
    ],
)
def test_wrong_values_are_one_line(key, value, message):
    with pytest.raises(ValueError, match=message) as raised:
        cat_model(**ACD | {key: value})
    assert "\n" not in str(raised.value)
