"""Contract of identities: a model whose parts change nothing is the library's, with its names."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from cat_lm import architectures
from cat_lm.ops.convolution import kinds
from cat_lm.ops.long_filter import filters
from tests.contracts.models import BY, OTHERS, SHAPE, SIZES, build, close, each, tokens
from tests.contracts.pairs import pairwise

FAMILIES = {
    "gpt_neox": {"hidden_size": 32, "rotary_pct": 0.25},
    "gpt_neox half": {"hidden_size": 16, "rotary_pct": 0.5, "use_parallel_residual": False},
    "gpt_neox whole": {"hidden_size": 16, "rotary_pct": 1.0, "tie_word_embeddings": True},
    "llama": {"hidden_size": 16, "attention_bias": True, "num_key_value_heads": 2},
    "llama one": {"hidden_size": 16, "mlp_bias": True, "num_key_value_heads": 1, "head_dim": 6},
    "llama all": {"hidden_size": 16},
}
PARTS = {"none": {"conv_type": "none"}}
PARTS |= {name: {"conv_type": name, "conv_streams": "vkq"} for name in kinds.names()}
PARTS |= {name: {"conv_filter": name, "conv_state": 4} for name in filters.names()}
PARTS |= {streams: {"conv_streams": streams} for streams in ("q", "kv")}
PARTS |= {
    "rank 2": {"conv_rank": 2, "conv_window": 4},
    "l1": {"conv_norm": "l1"},
    "Canon": {"conv_type": "none", "canon": "ACD", "canon_init": "zero"},
    "maps": {"conv_type": "multihead", "conv_mixing": "maps"},
    "landmark": {"attention": "landmark", "attention_options": {"block": 4, "top_k": 9}},
    "chunk": {"attention": "chunk", "attention_options": {"size": 40}},
    "multi-token": {"attention": "multi_token"},
}
ROPE = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    | {"rope_theta": 10000.0},
}
ONLY = {
    "landmark": ("eager", "sdpa"),
    "chunk": ("eager", "sdpa"),
    "multi-token": ("eager",),
    "maps": tuple(BY),
}


def is_allowed(row: dict[str, str]) -> bool:
    mixes_in_llama = row["part"] == "maps" and "llama" in row["family"]
    return not mixes_in_llama and row["by"] in ONLY.get(row["part"], BY)


ROWS = pairwise(
    {"family": list(FAMILIES), "part": list(PARTS), "rope": list(ROPE), "by": list(BY)}, is_allowed
)


def with_biases(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
    return model.eval()


def gradients(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    model(ids, labels=ids, use_cache=False).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row.values()))
def test_parts_that_change_nothing_leave_the_librarys_model(row):
    """Logits and gradients, from a state_dict with the library's names."""
    family = architectures.get(row["family"].partition(" ")[0])
    fields = SIZES | SHAPE | FAMILIES[row["family"]] | BY[row["by"]]
    fields["rope_parameters"] = ROPE[row["rope"]]
    torch.manual_seed(0)
    library, ours = family.library_classes(), family.classes()
    stock = with_biases(library.causal_lm(library.config(**copy.deepcopy(fields))))
    model = ours.causal_lm(ours.config(**copy.deepcopy(fields | PARTS[row["part"]]))).eval()
    missing, unexpected = model.load_state_dict(stock.state_dict(), strict=False)
    assert not unexpected
    assert all(("filter" in name) or ".core." in name for name in missing)
    named = {family.own_name(model.config, name) for name in stock.state_dict()}
    assert named.union(missing) == set(model.state_dict())
    ids = tokens(2, 30)
    with torch.set_grad_enabled(row["by"] != "flex_attention"):
        found, expected = model(ids).logits, stock(ids).logits
    assert row["part"] != "none" or torch.equal(found, expected)
    close(found, expected, 1e-5)
    if row["by"] == "flex_attention":
        return
    own, theirs = gradients(model, ids), gradients(stock, ids)
    for name, gradient in theirs.items():
        close(own[family.own_name(model.config, name)], gradient, 1e-5)


@each([case for case in OTHERS if architectures.has_stock(case.architecture)])
def test_recurrent_families_are_the_librarys(case):
    family, model = case.architecture, build(case)
    try:
        kind = family.library_classes().causal_lm
    except ImportError as error:
        pytest.skip(f"{family.title}: {error}")
    stock = kind(architectures.library_config(model.config)).eval()
    stock.load_state_dict(model.state_dict())
    ids = tokens(2, 30)
    close(model(ids).logits, stock(ids, use_cache=False).logits, 1e-5)
    own, theirs = gradients(model, ids), gradients(stock, ids)
    assert own.keys() == theirs.keys()
    for name, gradient in theirs.items():
        close(own[name], gradient, 1e-4)


@torch.no_grad()
def test_without_positions_earlier_tokens_are_a_set():
    """Nothing is rotated, so that they may trade places; with rotary positions they may not."""
    ids = tokens(1, 12)
    swapped = ids[:, [3, 1, 2, 0, *range(4, 12)]]
    for name in ("gpt_neox", "llama"):
        ours = architectures.get(name).classes()
        for position in ("none", "rope"):
            torch.manual_seed(0)
            fields = {"conv_type": "none", "position_embedding": position, "num_hidden_layers": 1}
            model = ours.causal_lm(ours.config(**SIZES | SHAPE | {"hidden_size": 32} | fields))
            for parameter in model.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
            found, other = (model.eval()(x).logits[:, 4:] for x in (ids, swapped))
            assert torch.allclose(found, other, atol=1e-4) == (position == "none")
