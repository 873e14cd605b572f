"""Configurations of transformers: sizes, descriptions, differences between runs, wrong values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from cat_lm import architectures
from cat_lm.config import load_config
from cat_lm.model import CatConfig
from cat_lm.model.hf.inspection import describe_backend
from cat_lm.training.estimate import num_parameters
from tests.tiny_models import SIZES, VARIANTS, cat_model, random_ids

CONFIGS = Path(__file__).parents[3] / "configs"
ROPE = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
PYTHIA, TFPP, CAT = 367_847_424, 373_867_520, 24_192
NUMBERS = {
    "pythia": PYTHIA,
    "cat_rope": PYTHIA + CAT,
    "cat_nope": PYTHIA + CAT,
    "mh_cat_rope": PYTHIA + 387_072,
    "mh_maps_rope": PYTHIA + 387_072,
    "tfpp": TFPP,
    "tfpp_cat": TFPP + CAT,
    # Canon layers of 4 taps: at A, C and D 589,824 (gated 761,856), at B 294,912.
    "canon_abcd": PYTHIA + 589_824 + 294_912,
    "cat_canon_acd": PYTHIA + CAT + 589_824,
    "tfpp_canon_abcd": TFPP + 1_032_192,
    "tfpp_cat_canon_acd": TFPP + CAT + 1_032_192 - 294_912,
    # 34 numbers for each of 24 x 16 x 3 filters.
    "cat_ssm_rope": PYTHIA + 39_168,
    "cat_ssm_nope": PYTHIA + 39_168,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_paper_models_have_their_sizes(name):
    config = load_config(CONFIGS / f"pretrain/{name}.yaml")
    assert num_parameters(config, 0) == NUMBERS[name]
    assert config.train.max_tokens == 15_000_000_000 and config.optimizer.lr == 3e-4


def test_configuration_survives_saving(tmp_path):
    fields = {"conv_type": "multihead", "conv_mixing": "maps", "conv_window": 7}
    fields |= {"conv_streams": "kv", "position_embedding": "none", "rotary_pct": 0.5}
    config = CatConfig(**SIZES, **fields)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is CatConfig and loaded.rotary_pct == 0.5
    differing = {key for key, value in config.to_dict().items() if loaded.to_dict()[key] != value}
    assert differing <= {"_name_or_path", "transformers_version"}
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["model_type"] == "cat_neox" and stored["conv_mixing"] == "maps"


DESCRIBED = {
    "no convolutions": {"conv_type": "none"},
    "head convolution of q, k, v (W=4): cpu, ": {},
    "head convolution of v (W=4): cpu, ": {"conv_streams": "v"},
    "multihead convolution of q, k (W=4): cpu, ": VARIANTS["maps"],
    "Canon layers A, C (W=4): cpu, ": {"conv_type": "none", "canon": "CA"},
    "smoothed values (W=3): cpu, ": {"conv_type": "none", "value_transform": "smoothing"}
    | {"value_options": {"width": 3}},
    "ssm filters of q, k, v": {"conv_filter": "ssm", "conv_state": 6, "conv_window": 21},
}


@pytest.mark.parametrize("words", DESCRIBED)
def test_backend_is_described_and_refused(words):
    model = cat_model(**{"conv_window": 4} | DESCRIBED[words])
    assert describe_backend(model.config, "cpu", torch.float32).startswith(words)
    if words == "no convolutions":
        return
    model.set_conv_backend("triton")  # which does not serve tensors on a CPU
    with pytest.raises(ValueError, match="triton"):
        model(random_ids(1, 9))
    with pytest.raises(ValueError, match="must be one of auto, reference, cpu, triton"):
        model.set_conv_backend("cuda")


PLAIN, ADDED = {"conv_type": "none"}, "python -m cat_lm.upcycle adds convolutions to a model"
DECAY = {"score_transform": "exponential_decay"}
LAS = DECAY | {"value_transform": "smoothing"}
LAS |= {"attention": "chunk", "attention_options": {"size": 7}}
# Of a checkpoint's model and a run's: what the run may not change.
DIFFERENCES = [
    (PLAIN, PLAIN | {"canon_window": 9, "canon_init": "zero"}, []),
    (PLAIN | {"canon": "A"}, PLAIN | {"canon": "A", "canon_init": "zero"}, []),
    (PLAIN, PLAIN | {"canon": "A"}, ["model.canon is 'none' there and 'A' here", ADDED]),
    (
        PLAIN | {"canon": "A"},
        PLAIN | {"canon": "A", "canon_window": 9},
        ["model.canon_window is 4 there and 9 here"],
    ),
    (PLAIN, PLAIN | {"qk_norm": "rms"}, ["model.qk_norm is 'none' there and 'rms' here"]),
    (PLAIN, PLAIN | LAS, []),  # whose weights fit
    (
        PLAIN | {"attention": "chunk"},
        PLAIN | DECAY,
        [
            "model.attention is 'chunk' there and 'softmax' here",
            "model.attention_options is {'size': 128} there and {} here",
        ],
    ),
    (
        PLAIN | DECAY,
        PLAIN,
        [
            "model.score_transform is 'exponential_decay' there and 'none' here",
            "model.score_options is {'spacing': 'slow', 'bound': 0.001} there and None here",
        ],
    ),
    # Softmax attention finds its blocks before it learns to.
    (PLAIN, PLAIN | {"attention": "landmark"}, []),
    (
        PLAIN | {"attention": "landmark"},
        PLAIN,
        ["model.attention is 'landmark' there and 'softmax' here"],
    ),
]


@pytest.mark.parametrize(("there", "here", "said"), DIFFERENCES)
def test_run_may_change_only_what_its_weights_allow(there, here, said):
    family = architectures.get("gpt_neox")
    values = (family.section_values(cat_model(**fields).config) for fields in (there, here))
    assert family.differences(*values) == said


MAPS, MULTI = VARIANTS["maps"], {"attention": "multi_token", "attn_implementation": "eager"}
SSM = {"conv_filter": "ssm", "conv_state": 6}
LANDMARK = {"attention": "landmark"}
SMOOTH = {"value_transform": "smoothing"}
LLAMA = {"family": "llama"}


def options(name: str, **values) -> dict:
    return {f"{name}_options": values}


WRONG = [
    ({"conv_type": "heads"}, "conv_type='heads': must be one of none, head"),
    ({"conv_streams": ""}, 'conv_streams="": must name some of q, k and v'),
    ({"conv_window": 0}, "conv_window=0"),
    ({"conv_init": "zero"}, "must be 'identity', 'uniform' or 'residual'"),
    (MAPS | {"conv_streams": "qk"}, "conv_mixing=maps: needs conv_type=multihead and the stream v"),
    (PLAIN | {"conv_activation": "silu"}, "conv_activation=silu: no stream is"),
    ({"rotary_pct": 0.0}, "rotary_pct=0.0: must be greater than 0"),
    ({"rotary_pct": 0.4}, "rotates 3 of a head's 8 channels"),
    (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads=3: must divide num_attention_heads"),
    (LLAMA | {"head_dim": 7}, "head_dim=7: rotates 7 of a head"),
    (LLAMA | {"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0: must be from"),
    (LLAMA | {"mlp_bias": "yes"}, "mlp_bias='yes': must be true or false"),
    ({"canon": "ABCD"}, "must be none or some of A, C and D, .*; B is conv_type=depthwise"),
    ({"canon": "AA"}, "each once"),
    ({"canon": "A", "canon_init": "identity"}, "canon_init='identity': must be .uniform."),
    ({"canon": "A", "canon_window": 0}, "canon_window=0: must be from 1"),
    ({"qk_norm": "l3"}, "qk_norm='l3': must be 'none', 'l2' or 'rms'"),
    ({"qk_norm_place": "before"}, "qk_norm_place=before: needs qk_norm"),
    (PLAIN | {"qk_norm": "l2", "qk_norm_place": "before"}, "a convolution of q or k"),
    (PLAIN | {"conv_norm": "l1"}, "conv_norm=l1: there are no filters of taps"),
    ({"conv_rank": 2, "conv_streams": "k"}, "conv_rank=2: needs .* streams q and k"),
    ({"conv_rank": 2, "conv_type": "depthwise"}, "needs conv_type=head.* not .*=depthwise"),
    ({"conv_rank": 6, "conv_window": 5}, "conv_rank=6: is above conv_window=5; .* at most rank W"),
    (MULTI | {"conv_rank": 2}, "conv_rank=2: cannot be combined with multi-token attention"),
    (MULTI | {"attn_implementation": "sdpa"}, "cannot compute multi-token attention"),
    (MULTI | options("attention", key_window=4), "attention_options.key_window=4: must"),
    (MULTI | options("attention", head_mixing="x"), "head_mixing='x': must be one of n"),
    ({"conv_state": 4}, "conv_state=4: says nothing with conv_filter=taps; choose conv_filter"),
    (SSM | {"conv_state": 0}, "conv_filter=ssm: needs conv_state, .* as in conv_state=16"),
    (SSM | {"conv_state": 5}, "conv_state=5: must be even"),
    (SSM | {"conv_window": 4}, "conv_window=4: is for taps, and conv_filter=ssm has none"),
    (SSM | {"conv_type": "multihead"}, "needs conv_type=head, not conv_type=multihead"),
    (SSM | {"conv_filter": "fft"}, "conv_filter='fft': must be one of taps"),
    (LANDMARK | options("attention", block=0), "block=0: must be a whole number of at least 1"),
    (LANDMARK | options("attention", sink=1), "sink=1: must be true or false"),
    (LANDMARK | options("attention", filter="gauss"), "filter='gauss': must be one of box, expon"),
    (LANDMARK | options("attention", top_k=0, share="layer"), "share=layer: says nothing with top"),
    (LANDMARK | options("attention", blocks=2), "blocks: unknown with attention=landmark; known"),
    (LANDMARK | MAPS, "attention=landmark: not with conv_mixing=maps"),
    (LANDMARK | {"attn_implementation": "flex_attention"}, "flex_attention: cannot compute landm"),
    (LANDMARK | DECAY, "cannot be combined with landmark attention"),
    (DECAY | options("score", bound=1e-9), "score_options.bound=1e-09: must be a number between"),
    (DECAY | options("score", spacing="fast"), "score_options.spacing='fast': must be one of"),
    (DECAY | {"num_attention_heads": 1}, "needs num_attention_heads of at least 2"),
    (SMOOTH | options("value", width=1), "value_options.width=1: smooths nothing; use"),
    (SMOOTH | options("value", width=2.5), "value_options.width=2.5: must be a whole number"),
    (SMOOTH | MAPS, "value_transform=smoothing: cannot be combined with"),
    (
        {"attention": "chunk"} | options("attention", size=0),
        "attention_options.size=0: must be fro",
    ),
    ({"attention": "map_mixing"}, "attention=map_mixing: is chosen by conv_type=multihead"),
    (options("score", start=1), "score_options={.*}: says nothing with score_transform=none"),
    ({"rope_parameters": {"rope_type": "llama3"}}, "'llama3' is not supported"),
    ({"rope_parameters": {"rope_type": "linear"}}, "factor: missing"),
    ({"rope_parameters": {"factor": 2.0}}, "factor: unknown with rope_type default"),
    ({"rope_parameters": ROPE | {"attn_factor": 1.0}}, "attn_factor: unknown"),
    ({"rope_parameters": ROPE | {"factor": 0.5}}, "factor=0.5: must be"),
    ({"rope_parameters": ROPE | {"factor": True}}, "must be a number"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor: missing"),
]


@pytest.mark.parametrize(("fields", "said"), WRONG, ids=[said for _, said in WRONG])
def test_wrong_configuration_is_one_line(fields, said):
    kinds = architectures.get(fields.get("family", "gpt_neox")).classes()
    config = {key: value for key, value in fields.items() if key != "family"}
    with pytest.raises(ValueError, match=said.replace("'", "[\"']")) as raised:
        kinds.causal_lm(kinds.config(**SIZES | config))
    assert "\n" not in str(raised.value)


def test_flash_attention_takes_heads_of_256_channels():
    family = architectures.get("gpt_neox")
    section = architectures.section_of(cat_model(conv_rank=3).config)
    changes = {"hidden_size": 512, "attn_implementation": "flash_attention_2"}
    wide = section.model_copy(update=changes)
    assert family.problems(wide.model_copy(update={"conv_rank": 2}), 128) == []
    (found,) = family.problems(wide, 128)
    assert found.startswith("conv_rank=3: makes heads of 384 channels")
    model = cat_model(**MAPS)
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="flash_attention_2: cannot compute mixed attention maps"):
        model(random_ids(1, 5))


ROWS = {"vanilla": (), "l": ("score",), "s": ("value",), "las": ("score", "value")}


@pytest.mark.parametrize("text", ["text8", "enwik8", "wt103"])
def test_las_models_are_the_papers(text):
    for name, transforms in ROWS.items():
        config = load_config(CONFIGS / f"las/{text}_{name}.yaml")
        model = config.model
        sizes = (model.hidden_size, model.num_attention_heads, config.data.context_length)
        assert sizes == (768, 8, 512)
        assert model.num_hidden_layers == (12 if text == "wt103" else 6)
        assert (model.score_transform != "none") == ("score" in transforms)
        assert (model.value_transform != "none") == ("value" in transforms)
