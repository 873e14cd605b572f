"""Configuration, initial weights, saving and loading, meta device."""

import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import cat_lm  # noqa: F401
from cat_lm.core.errors import UserError
from cat_lm.model import CatConfig, CatForCausalLM
from cat_lm.model.weight_decay import parameters_by_decay
from tests.unit.tiny_models import (
    SIZES,
    VARIANTS,
    cat_model,
    each_variant,
    random_ids,
    stock_model,
)

PAPER_MODEL = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}


def count(**fields):
    with torch.device("meta"):
        model = CatForCausalLM(CatConfig(**PAPER_MODEL, **fields))
    return sum(parameter.numel() for parameter in model.parameters())


def test_parameter_counts():
    assert count(conv_type="none") == 367_847_424
    assert count(conv_type="head", conv_window=21) == 367_847_424 + 24_192
    assert count(conv_type="head", conv_window=21, conv_streams="v") == 367_847_424 + 8_064
    assert count(position_embedding="none") == 367_847_424 + 24_192
    assert count(conv_type="multihead", conv_window=21) == 367_847_424 + 387_072
    maps = {"conv_type": "multihead", "conv_mixing": "maps"}
    assert count(**maps, conv_window=21) == 367_847_424 + 387_072
    assert count(conv_type="depthwise", conv_window=4) == 367_847_424 + 24 * 3 * 1024 * 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"conv_type": "heads"}, "conv_type='heads': must be one of none, head"),
        ({"conv_streams": "qx"}, 'conv_streams="qx": must name some of q, k and v'),
        ({"conv_streams": ""}, "must name some of q, k and v"),
        ({"conv_streams": "qq"}, "each once"),
        ({"conv_window": 0}, "conv_window=0"),
        ({"conv_init": "zero"}, "choose one of identity, uniform"),
        ({"conv_mixing": "map"}, "conv_mixing='map' is not supported; choose one of embeddings"),
        ({"conv_mixing": "maps"}, "needs conv_type=multihead and the stream v"),
        (
            {"conv_type": "multihead", "conv_mixing": "maps", "conv_streams": "qk"},
            "conv_mixing=maps: needs conv_type=multihead and the stream v",
        ),
        ({"conv_activation": "silu"}, "conv_activation=silu: needs conv_type=depthwise"),
        ({"conv_activation": "relu"}, "choose one of none, silu"),
        ({"position_embedding": "alibi"}, "choose one of rope, none"),
        ({"rotary_pct": 0.0}, "rotary_pct=0.0: rotates 0 of a head's 8 channels"),
        ({"rotary_pct": 0.4}, "rotates 3 of a head's 8 channels"),
        ({"rotary_pct": 1.5}, "rotary_pct=1.5"),
        (
            {"rotary_pct": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
            "partial_rotary_factor=0.25: give it as rotary_pct, which is 0.5",
        ),
    ],
    ids=str,
)
def test_wrong_configurations_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        CatConfig(**SIZES, **fields)


def test_configuration_survives_saving(tmp_path):
    config = CatConfig(
        **SIZES,
        conv_type="multihead",
        conv_mixing="maps",
        conv_window=7,
        conv_streams="kv",
        conv_init="uniform",
        position_embedding="none",
        rotary_pct=0.5,
    )
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is CatConfig
    differing = {key for key, value in config.to_dict().items() if loaded.to_dict()[key] != value}
    assert differing <= {"_name_or_path", "transformers_version"}
    assert loaded.rotary_pct == 0.5
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["model_type"] == "cat_neox"
    assert stored["conv_type"] == "multihead" and stored["conv_streams"] == "kv"
    assert stored["conv_mixing"] == "maps" and stored["conv_activation"] == "none"


@each_variant("none")
def test_initial_weights(variant):
    sizes = SIZES | {"hidden_size": 128, "vocab_size": 500, "intermediate_size": 512}
    config = CatConfig(**sizes, **variant)
    torch.manual_seed(0)
    model = CatForCausalLM(config)
    small, wang = math.sqrt(2 / (5 * 128)), 2 / (2 * math.sqrt(128))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        elif name.endswith("_filter"):
            assert torch.equal(parameter, delta_filters(config)), name
        else:
            residual = name.endswith(("attention.dense.weight", "dense_4h_to_h.weight"))
            std = wang if residual else small
            assert parameter.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(parameter.mean().item()) < 0.03 * std, name


def delta_filters(config):
    """1 at lag 0 of a head, or channel, for itself."""
    heads, window = config.num_attention_heads, config.conv_window
    delta = torch.zeros(window).index_fill(0, torch.tensor(0), 1.0)
    if config.conv_type == "multihead":
        return delta[:, None, None] * torch.eye(heads)
    if config.conv_type == "depthwise":
        return delta.expand(heads, config.hidden_size // heads, window)
    return delta.expand(heads, window)


@each_variant("none")
def test_uniform_filters(variant):
    bound = 1 / 16 if variant["conv_type"] == "multihead" else 1 / 8
    fields = {**variant, "conv_init": "uniform", "conv_window": 64}
    model = CatForCausalLM(CatConfig(**SIZES, **fields))
    filters = torch.cat([p for n, p in model.named_parameters() if n.endswith("_filter")])
    assert filters.abs().max() <= bound
    assert filters.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary_pct", [0.25, 0.5, 1.0])
@each_variant()
def test_save_and_load(tmp_path, variant, rotary_pct, dtype):
    """Every parameter and every buffer, also the rotary frequencies, which are not in the file."""
    model = cat_model(**variant, rotary_pct=rotary_pct).to(dtype)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert type(loaded) is CatForCausalLM
    assert_same_tensors(loaded, model)
    ids = random_ids(2, 60)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def assert_same_tensors(model, expected):
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(model, kind)()), dict(getattr(expected, kind)())
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert ours[name].dtype == tensor.dtype, name
            assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("conv_init", ["identity", "uniform"])
@each_variant()
def test_meta_device_and_back(variant, conv_init, dtype):
    expected = cat_model(**variant, conv_init=conv_init).to(dtype)
    with torch.device("meta"):
        model = CatForCausalLM(expected.config).to(dtype)
    model.to_empty(device="cpu")
    for module in model.modules():
        module._is_hf_initialized = False
    model.init_weights()
    for name, parameter in model.named_parameters():
        if name.endswith("_filter") and conv_init == "identity":
            assert torch.equal(parameter, delta_filters(model.config).to(dtype)), name
        assert parameter.isfinite().all() and parameter.abs().max() <= 1, name
    for name, buffer in expected.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], buffer), name
    model.load_state_dict(expected.state_dict())
    ids = random_ids(1, 20)
    assert torch.equal(model.eval()(ids).logits, expected(ids).logits)


def test_rotary_frequencies_keep_fp32():
    """An engine that casts the model must not round the angles of far positions."""
    model = cat_model()
    before = model.gpt_neox.rotary_emb.inv_freq.clone()
    model.bfloat16()
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(model.gpt_neox.rotary_emb.inv_freq, before)
    assert model.gpt_neox.rotary_emb.original_inv_freq.dtype == torch.float32


def test_a_pythia_folder_loads_with_identity_filters(tmp_path):
    stock = stock_model()
    stock.save_pretrained(tmp_path)
    model = CatForCausalLM.from_pretrained(tmp_path, config=CatConfig(**SIZES))
    ids = random_ids(1, 30)
    torch.testing.assert_close(model(ids).logits, stock(ids).logits, rtol=1e-5, atol=1e-6)
    model.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again/model.safetensors").keys() == model.state_dict().keys()


def test_state_dict_has_the_names_of_gpt_neox():
    theirs = set(stock_model().state_dict())
    convolution = {
        f"gpt_neox.layers.{layer}.attention.convolution.{name}"
        for layer in range(2)
        for name in ("bias", "q_filter", "k_filter", "v_filter")
    }
    projections = {name for name in theirs if not name.endswith(".query_key_value.bias")}
    for name, variant in VARIANTS.items():
        ours = set(cat_model(**variant).state_dict())
        assert ours == (theirs if name == "none" else projections | convolution)


def test_state_dict_with_library_names_is_read():
    stock, model = stock_model(), CatForCausalLM(CatConfig(**SIZES)).eval()
    missing, unexpected = model.load_state_dict(stock.state_dict(), strict=False)
    assert all(name.endswith("_filter") for name in missing) and not unexpected
    ids = random_ids(1, 30)
    torch.testing.assert_close(model(ids).logits, stock(ids).logits, rtol=1e-5, atol=1e-6)


def test_every_module_says_what_takes_no_decay():
    """A kind of module that does not would have its filters or rates shrink without a word."""
    for variant in VARIANTS.values():
        model = cat_model(**variant)
        decayed, exempt = parameters_by_decay(model)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        assert len(decayed) + len(exempt) == len(names)
        for parameter in exempt:
            assert re.search(r"(bias|norm\.weight|_filter)$", names[id(parameter)])
        for parameter in decayed:
            assert re.search(r"\.(weight)$", names[id(parameter)]) and parameter.ndim == 2

    class Rates(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.A_log = torch.nn.Parameter(torch.zeros(2, 2))

    with pytest.raises(UserError, match=r"^model: 0: Rates has parameters"):
        parameters_by_decay(torch.nn.Sequential(Rates()))
    Rates.no_decay = ("A_log",)
    assert [len(part) for part in parameters_by_decay(Rates())] == [0, 1]
