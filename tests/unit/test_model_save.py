"""Configuration, initial weights, saving and loading, meta device."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

import cat_lm  # noqa: F401
from cat_lm.core.errors import UserError
from cat_lm.core.parameters import parameters_by_decay
from cat_lm.model import CatConfig, CatForCausalLM
from tests.unit.tiny_models import (
    SIZES,
    VARIANTS,
    cat_model,
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
        ({"conv_streams": ""}, 'conv_streams="": must name some of q, k and v'),
        ({"conv_window": 0}, "conv_window=0"),
        ({"conv_init": "zero"}, "must be 'identity', 'uniform' or 'residual'"),
        (
            {"conv_type": "multihead", "conv_mixing": "maps", "conv_streams": "qk"},
            "conv_mixing=maps: needs conv_type=multihead and the stream v",
        ),
        ({"conv_type": "none", "conv_activation": "silu"}, "conv_activation=silu: no stream is"),
        ({"rotary_pct": 0.0}, "rotary_pct=0.0: must be greater than 0"),
        ({"rotary_pct": 0.4}, "rotates 3 of a head's 8 channels"),
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


def test_a_pythia_folder_loads_with_identity_filters(tmp_path):
    stock = stock_model()
    stock.save_pretrained(tmp_path)
    model = CatForCausalLM.from_pretrained(tmp_path, config=CatConfig(**SIZES))
    ids = random_ids(1, 30)
    torch.testing.assert_close(model(ids).logits, stock(ids).logits, rtol=1e-5, atol=1e-6)
    model.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again/model.safetensors").keys() == model.state_dict().keys()


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
