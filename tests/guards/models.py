"""Tiny models of every family and option: the `model:` section of a configuration for each.

The losses train them by `train.py`, and the values build them by transformers' Auto classes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]

NEOX: dict[str, Any] = {
    "architecture": "gpt_neox",
    "conv_type": "none",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA = NEOX | {"architecture": "llama", "num_key_value_heads": 2}
RECURRENT = {"hidden_size": 32, "num_hidden_layers": 2}
MAMBA2 = {"head_dim": 16, "num_heads": 4, "state_size": 16, "n_groups": 2}
SMALL = {"num_heads": 2, "head_dim": 12}
MIXER = RECURRENT | {"architecture": "mixer", "intermediate_size": 64}

# The filters differ from the identity, so that a fault in any tap changes the numbers.
CAT = {"conv_type": "head", "conv_window": 5, "conv_init": "uniform"}
LONG = {"conv_type": "head", "conv_init": "uniform"}
MULTIHEAD = CAT | {"conv_type": "multihead"}
DEPTHWISE = CAT | {"conv_type": "depthwise"}
NOPE = {"position_embedding": "none"}
LANDMARK = {"attention": "landmark", "attention_options": {"block": 4, "top_k": 2, "local": 2}}
DECAY = {"score_transform": "exponential_decay"}
DECAY |= {"score_options": {"spacing": "slow", "bound": 0.1}}
LAS = DECAY | {"value_transform": "smoothing", "value_options": {"width": 3}}
EAGER = {"attn_implementation": "eager"}

MODELS: dict[str, dict[str, Any]] = {
    "pythia": NEOX,
    "pythia_nope": NEOX | NOPE,
    "pythia_sequential_tied": NEOX | {"use_parallel_residual": False, "tie_word_embeddings": True},
    "cat": NEOX | CAT,
    "cat_nope": NEOX | CAT | NOPE,
    "cat_identity": NEOX | CAT | {"conv_init": "identity"},
    "cat_k": NEOX | CAT | {"conv_streams": "k"},
    "cat_qv_full_rotation": NEOX | CAT | {"conv_streams": "qv", "rotary_pct": 1.0},
    "cat_window_21": NEOX | CAT | {"conv_window": 21},
    "cat_filter_norm": NEOX | CAT | {"conv_norm": "l1"},
    "cat_rms_before": NEOX | CAT | {"qk_norm": "rms", "qk_norm_place": "before"},
    "cat_l2_after": NEOX | CAT | {"qk_norm": "l2"},
    "cat_rank": NEOX | CAT | {"conv_streams": "qk", "conv_rank": 2},
    "cat_temperature": NEOX | CAT | {"attention_temperature": 1.3},
    "multihead": NEOX | MULTIHEAD,
    "multihead_v_nope": NEOX | MULTIHEAD | NOPE | {"conv_streams": "v"},
    "maps": NEOX | MULTIHEAD | EAGER | {"conv_mixing": "maps"},
    "maps_v": NEOX | MULTIHEAD | EAGER | {"conv_mixing": "maps", "conv_streams": "v"},
    "depthwise": NEOX | DEPTHWISE,
    "depthwise_silu": NEOX | DEPTHWISE | {"conv_activation": "silu"},
    "canon_abcd": NEOX | DEPTHWISE | {"conv_window": 4, "conv_init": "residual", "canon": "ACD"},
    "cat_canon": NEOX | CAT | {"canon": "ACD", "canon_window": 3},
    "exponential": NEOX | LONG | {"conv_filter": "exponential", "conv_state": 4},
    "exponential_one_nope": NEOX | LONG | NOPE | {"conv_filter": "exponential", "conv_state": 1},
    "ssm": NEOX | LONG | {"conv_filter": "ssm", "conv_state": 4},
    "chunk": NEOX | CAT | {"attention": "chunk", "attention_options": {"size": 8}},
    "multi_token": NEOX
    | EAGER
    | {"attention": "multi_token", "attention_options": {"query_window": 3, "key_window": 3}},
    "landmark": NEOX | CAT | LANDMARK,
    "landmark_learned": NEOX
    | CAT
    | {"attention": "landmark"}
    | {"attention_options": {"block": 4, "top_k": 2, "filter": "learned", "sink": True}},
    "las": NEOX | LAS,
    "las_filter": NEOX | CAT | DECAY | {"conv_streams": "v"},
    "las_steep": NEOX | LAS | {"score_options": {"spacing": "steep", "bound": 0.5}},
    "tfpp": LLAMA,
    "tfpp_cat": LLAMA | CAT,
    "tfpp_cat_canon": LLAMA | CAT | {"canon": "ACD"},
    "tfpp_multihead": LLAMA | MULTIHEAD | {"num_key_value_heads": 4},
    "tfpp_depthwise": LLAMA | DEPTHWISE,
    "tfpp_rms": LLAMA | CAT | {"qk_norm": "rms", "head_dim": 16},
    "tfpp_las": LLAMA | LAS,
    "tfpp_landmark": LLAMA | LANDMARK,
    "gla": RECURRENT | {"architecture": "gla", "num_heads": 2},
    "gla_convolved": RECURRENT | {"architecture": "gla", "num_heads": 2, "use_short_conv": True},
    "delta_net": RECURRENT | {"architecture": "delta_net", "num_heads": 2},
    "gated_deltanet": RECURRENT
    | {"architecture": "gated_deltanet", "num_heads": 2, "head_dim": 12},
    "mamba": RECURRENT | {"architecture": "mamba"},
    "mamba2": RECURRENT | MAMBA2 | {"architecture": "mamba2"},
    "mixer_attention": MIXER
    | {"mixer": "attention", "mixer_options": {"position": "rope", "dropout": 0.0}},
    "mixer_cat": MIXER | {"mixer": "cat", "mixer_options": {"heads": 2, "dropout": 0.0}},
    "mixer_landmark": MIXER
    | {"mixer": "landmark", "mixer_options": {"heads": 2, "block": 4, "top_k": 2, "dropout": 0.0}},
    "mixer_multi_token": MIXER
    | {"mixer": "multi-token", "mixer_options": {"heads": 2, "dropout": 0.0}},
    "mixer_based": MIXER | {"mixer": "based"},
    "mixer_lincat": MIXER | {"mixer": "lincat", "mixer_options": {"heads": 2}},
    "mixer_linear_attention": MIXER | {"mixer": "linear-attention", "mixer_options": {"heads": 2}},
    "mixer_gla": MIXER | {"mixer": "gla", "mixer_options": {"heads": 2}},
    "mixer_deltanet": MIXER | {"mixer": "deltanet", "mixer_options": {"heads": 2}},
    "mixer_gated_deltanet": MIXER | {"mixer": "gated-deltanet", "mixer_options": {"heads": 2}},
    "mixer_mamba": MIXER | {"mixer": "mamba"},
}


def pretrain_models() -> dict[str, dict[str, Any]]:
    """Return the `model:` sections of configs/pretrain, made small."""
    models = {}
    for path in sorted((ROOT / "configs/pretrain").glob("*.yaml")):
        if not path.name.startswith("base_"):
            models[f"pretrain/{path.stem}"] = _shrink(_read_section(path))
    return models


def _read_section(path: Path) -> dict[str, Any]:
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    base = _read_section(path.parent / values["base"]) if "base" in values else {}
    return base | values.get("model", {})


def _shrink(section: dict[str, Any]) -> dict[str, Any]:
    """Return the section with two layers of 32 channels; windows and states stay as they are."""
    small = section | {"hidden_size": 32, "num_hidden_layers": 2}
    del small["vocab_size"]
    architecture = small.setdefault("architecture", "gpt_neox")
    if architecture in ("gpt_neox", "llama"):
        small |= {"intermediate_size": 64, "num_attention_heads": 4}
        small.setdefault("conv_type", "none")
    small |= {key: small_value for key, small_value in SMALL.items() if key in small}
    if small.get("conv_mixing") == "maps":
        small |= EAGER
    return small | (MAMBA2 if architecture == "mamba2" else {})
