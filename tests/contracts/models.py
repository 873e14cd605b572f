"""Tiny seeded models for the contracts: one case for each family, and the pairs of its options."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cat_lm  # noqa: F401
from cat_lm import architectures, mixers
from cat_lm.model import attention
from cat_lm.model.attention import Pattern, ScoreTransform, ValueTransform
from cat_lm.ops.convolution import kinds
from cat_lm.ops.long_filter import filters
from tests.contracts.pairs import pairwise

VOCABULARY, CONTEXT = 41, 64
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
SHAPE = {"num_attention_heads": 4, "intermediate_size": 24, "max_position_embeddings": CONTEXT}
SHAPE |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_neox": {"rotary_pct": 1.0},
    "llama": {"num_key_value_heads": 2, "attention_bias": True},
    "gpt_neox sequential": {"use_parallel_residual": False, "rotary_pct": 0.5},
    "llama without biases": {"mlp_bias": True, "head_dim": 6},
}
# Short filters of every kind, long ones of every kind, and what else the filters can be.
CONVOLUTIONS: dict[str, dict[str, Any]] = {"none": {"conv_type": "none"}}
CONVOLUTIONS |= {name: {"conv_type": name, "conv_window": 5} for name in kinds.names()}
CONVOLUTIONS |= {
    name: {"conv_type": "head", "conv_filter": name, "conv_state": 4, "conv_streams": streams}
    for name, streams in zip(filters.names(), ("qkv", "kv", "q", "v"), strict=False)
}
CONVOLUTIONS |= {
    "one tap": {"conv_type": "head", "conv_window": 1, "conv_streams": "vq"},
    "silu": {"conv_type": "depthwise", "conv_activation": "silu", "conv_streams": "k"}
    | {"conv_window": 4},
    "silu of heads": {"conv_type": "head", "conv_activation": "silu", "conv_streams": "qk"}
    | {"conv_window": 5},
    "l1": {"conv_type": "multihead", "conv_norm": "l1", "conv_window": 3},
    "rank 3": {"conv_type": "head", "conv_rank": 3, "conv_window": 4},
    "maps": {"conv_type": "multihead", "conv_mixing": "maps", "conv_window": 4},
}
PATTERN_OPTIONS = {
    "chunk": [{"size": 5}],
    "landmark": [
        {"block": 3, "top_k": 1, "local": 1, "share": "layer"},
        {"block": 4, "top_k": 1, "local": 2, "filter": "learned", "sink": True},
        {"block": 2, "top_k": 2, "local": 2, "filter": "exponential"},
        {"block": 3, "top_k": 2, "local": 1, "filter": "ssm", "filter_state": 4},
    ],
    "multi_token": [{"query_window": 3, "key_window": 5, "head_mixing": "both"}],
}
PATTERNS = {
    f"{name} {number}": {"attention": name, "attention_options": options}
    for name in attention.names(Pattern)
    if name != "map_mixing"  # which conv_mixing chooses
    for number, options in enumerate(PATTERN_OPTIONS.get(name, [{}]))
}
SCORE_OPTIONS = {
    "exponential_decay": [{"spacing": "slow", "bound": 0.9}, {"spacing": "steep", "bound": 1e-3}]
}
SCORES = {"none": {}} | {
    f"{name} {number}": {"score_transform": name, "score_options": options}
    for name in attention.names(ScoreTransform)
    if name != "none"
    for number, options in enumerate(SCORE_OPTIONS.get(name, [{}]))
}
VALUES = {"none": {}} | {
    name: {"value_transform": name, "value_options": {"smoothing": {"width": 3}}.get(name)}
    for name in attention.names(ValueTransform)
    if name != "none"
}
NORMS = {
    "none": {},
    "l2": {"qk_norm": "l2"},
    "rms": {"qk_norm": "rms"},
    "l2 before": {"qk_norm": "l2", "qk_norm_place": "before"},
    "rms before": {"qk_norm": "rms", "qk_norm_place": "before"},
}
CANON = {
    "none": {},
    "ACD": {"canon": "ACD", "canon_window": 4},
    "A": {"canon": "A", "canon_window": 1},
    "CD": {"canon": "DC", "canon_window": 2},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
POSITIONS = {
    "rope": {},
    "none": {"position_embedding": "none", "attention_temperature": 1.3},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}},
    "yarn": {"rope_parameters": YARN | {"rope_theta": 10000.0}},
}
BY = {name: {"attn_implementation": name} for name in ("eager", "sdpa", "flex_attention")}
OPTIONS = {"family": FAMILIES, "convolution": CONVOLUTIONS, "pattern": PATTERNS, "score": SCORES}
OPTIONS |= {"value": VALUES, "norm": NORMS, "canon": CANON, "position": POSITIONS, "by": BY}


def _fields(row: dict[str, str]) -> dict[str, Any]:
    """Return the configuration fields of a row of labels."""
    return {
        key: value for name, label in row.items() for key, value in OPTIONS[name][label].items()
    }


def _goes_together(row: dict[str, str]) -> bool:
    """Return True if a configuration may have the options of a row."""
    fields = _fields(row)
    pattern = attention.pattern(SimpleFields(fields))
    transformed = row["score"] != "none" or row["value"] != "none"
    before, streams = "before" in row["norm"], fields.get("conv_streams", "qkv")
    mixes = fields.get("conv_mixing") == "maps"
    return not (
        (pattern.implementations and row["by"] not in pattern.implementations)
        or (transformed and not pattern.takes_transforms)
        or (before and (fields["conv_type"] == "none" or not {*"qk"} & {*streams}))
        or (fields.get("conv_rank") and (not pattern.takes_ranks or row["norm"] in ("l2", "rms")))
        or (mixes and (row["pattern"] != "softmax 0" or transformed or "llama" in row["family"]))
    )


class SimpleFields:
    """A section with the few keys that the registry of attention reads."""

    conv_type, conv_mixing, attention = "none", "embeddings", "softmax"

    def __init__(self, fields: dict[str, Any]):
        self.__dict__.update(fields)


@dataclass(frozen=True)
class Case:
    """A tiny model: the family, and the fields of its configuration."""

    name: str
    family: str
    fields: dict[str, Any] = field(hash=False)

    @property
    def architecture(self) -> architectures.Architecture:
        return architectures.get(self.family)

    @property
    def recurrent(self) -> bool:
        return self.architecture.recurrent or self.family == "mixer"

    def config(self, **changes: Any) -> Any:
        # A configuration keeps and changes the dictionaries that it gets.
        return self.architecture.classes().config(**copy.deepcopy(self.fields | changes))


# What the pairs leave out.
FURTHER = [
    {"family": "llama", "convolution": "maps"},
    {"family": "llama", "convolution": "maps", "norm": "l2", "by": "sdpa"},
    {"family": "llama", "convolution": "rank 3", "norm": "rms", "by": "sdpa"},
    {"family": "gpt_neox", "convolution": "rank 3", "norm": "l2"},
    {"family": "gpt_neox", "convolution": "rank 3, l1"},
    {"family": "llama", "convolution": "rank 3, l1", "norm": "l2 before"},
]


def _decoder_cases() -> list[Case]:
    rows = pairwise({name: list(values) for name, values in OPTIONS.items()}, _goes_together)
    CONVOLUTIONS["rank 3, l1"] = CONVOLUTIONS["rank 3"] | {"conv_norm": "l1"}
    first = {name: next(iter(values)) for name, values in OPTIONS.items()}
    rows += [first | row for row in FURTHER]
    cases = []
    for row in rows:
        changed = [label for name, label in row.items() if label != next(iter(OPTIONS[name]))]
        name = ", ".join([row["family"], *(x for x in changed if x != row["family"])])
        cases.append(Case(name, row["family"].partition(" ")[0], SIZES | SHAPE | _fields(row)))
    return cases


RECURRENT: dict[str, dict[str, Any]] = {
    "gla": {"num_heads": 2},
    "gla, short convolutions": {"num_heads": 2, "use_short_conv": True},
    "delta_net": {"num_heads": 2},
    "gated_deltanet": {"num_heads": 2},
    "mamba": {"state_size": 4},
    "mamba, biases": {"state_size": 3, "conv_kernel": 2, "use_bias": True},
    "mamba2": {"state_size": 8, "head_dim": 8, "n_groups": 2},
}
MIXER_OPTIONS = {
    "attention": {"dropout": 0.0, "heads": 2, "position": "rope"},
    "cat": {"dropout": 0.0, "heads": 2, "conv_type": "multihead"},
    "chunk": {"dropout": 0.0, "heads": 2, "size": 5},
    "landmark": {"dropout": 0.0, "heads": 2, "block": 3, "top_k": 1, "local": 1},
    "multi-token": {"dropout": 0.0, "heads": 2},
}


def _recurrent_cases() -> list[Case]:
    known = set(architectures.names()) - {"gpt_neox", "llama", "mixer"}
    lacking = {name: {} for name in known - {name.partition(",")[0] for name in RECURRENT}}
    found = []
    for name, keys in (RECURRENT | lacking).items():
        family = architectures.get(name.partition(",")[0])
        section = family.Section(**SIZES | keys)
        fields = family.fields(section, VOCABULARY, CONTEXT)
        found.append(Case(name, family.name, fields))
    for mixer in mixers.names():
        fields = SIZES | {"intermediate_size": 24, "mixer": mixer, "pad_token_id": 0}
        options = MIXER_OPTIONS.get(mixer, {})
        found.append(Case(f"mixer {mixer}", "mixer", fields | {"mixer_options": options}))
    learned = {
        "learned_positions": CONTEXT,
        "mixer": "attention",
        "mixer_options": {"dropout": 0.0},
    }
    fields = SIZES | {"intermediate_size": 24, "pad_token_id": 0} | learned
    return [*found, Case("mixer attention, learned positions", "mixer", fields)]


DECODERS, OTHERS = _decoder_cases(), _recurrent_cases()
CASES = DECODERS + OTHERS


def each(cases: list[Case]) -> pytest.MarkDecorator:
    """Return the parametrisation of a test over cases."""
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


every_case = each(CASES)


def build(case: Case, seed: int = 0, moved: bool = True, **changes: Any) -> nn.Module:
    """Return a case's model, its parameters away from their start so that each shows in logits."""
    torch.manual_seed(seed)
    model = case.architecture.classes().causal_lm(case.config(**changes)).eval()
    if moved:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter += 0.15 * torch.randn_like(parameter)
                if name.endswith(("query_key_value.weight", "q_proj.weight", "k_proj.weight")):
                    parameter *= 2  # so that attention is far from even
    return model


def tokens(*shape: int, seed: int = 0) -> Tensor:
    """Return token ids without 0, the padding."""
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, wanted: Tensor, tolerance: float = 2e-4) -> None:
    """Check that two tensors agree up to a part of the largest number."""
    scale = float(wanted.detach().abs().max().clamp(min=1))
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance * scale)
