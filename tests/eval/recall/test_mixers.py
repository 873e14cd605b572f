"""Recall's model around a mixer, what mixers start from, and wrong specifications."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from cat_lm.mixers import Setting, make_mixer
from cat_lm.model.context import Context
from eval.recall.model import RecallModel, learned_filters


def built(specification: str, width: int = 16, layer: int = 0, layers: int = 1) -> torch.nn.Module:
    torch.manual_seed(0)
    return make_mixer(specification).build(Setting(width, layer, layers)).eval()


def test_mamba_keeps_its_time_scales_or_falls_into_the_trap():
    def model(specification):
        torch.manual_seed(0)
        return RecallModel(
            make_mixer(specification), vocabulary=9, d_model=64, positions=9, layers=None
        )

    own, trap = model("mamba"), model("mamba:init=zoology")
    steps = F.softplus(own.blocks[0].token_mixer.dt_proj.bias)
    assert 0.0009 < steps.min() < 0.003 and 0.04 < steps.max() < 0.11
    assert not trap.blocks[0].token_mixer.dt_proj.bias.any()
    ours, theirs = (dict(m.blocks[0].token_mixer.named_parameters()) for m in (own, trap))
    spreads = {"in_proj": 0.02, "x_proj": 0.02, "dt_proj": 0.02, "out_proj": 0.02 / math.sqrt(4)}
    for name, spread in spreads.items():
        assert abs(theirs[f"{name}.weight"].std() / spread - 1) < 0.1, name
    bounds = {"in_proj": 64**-0.5, "x_proj": 128**-0.5, "dt_proj": 4**-0.5}
    bounds["out_proj"] = 128**-0.5 / math.sqrt(2)  # over the root of the number of layers
    for name, bound in bounds.items():
        assert 0.95 * bound < ours[f"{name}.weight"].abs().max() <= bound, name
    for name in ("A_log", "D"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0)
    torch.testing.assert_close(ours["A_log"][3].exp(), torch.arange(1.0, 17.0))
    assert theirs["conv1d.weight"].abs().max() > 0.45  # not a linear layer: left alone
    assert trap.positions is None and len(trap.blocks) == 2
    tokens = torch.randint(9, (2, 6))
    residual = own.eval().embedding(tokens)
    first, second = own.blocks
    residual = residual + first.attn(first.attn_norm(residual), Context())
    residual = residual + second.attn(second.attn_norm(residual), Context())
    out = own.norm(residual) @ own.embedding.weight.T
    torch.testing.assert_close(own(tokens, torch.ones(2, 6).bool()), out.flatten(0, 1))


def test_learned_filters_are_listed_by_layer_and_stream():
    model = RecallModel(
        make_mixer("cat:streams=kv,heads=2"), vocabulary=9, d_model=8, positions=9, layers=2
    )
    found = learned_filters(model)
    assert len(found) == 2 and list(found[0]) == ["k", "v"]
    assert torch.tensor(found[1]["v"]).shape == (2, 3)

    def of(specification):
        model = RecallModel(
            make_mixer(specification), vocabulary=9, d_model=8, positions=9, layers=2
        )
        return model, learned_filters(model)

    model, found = of("cat:streams=k,heads=2,conv_type=multihead,window=5")
    filters = model.blocks[0].token_mixer.streams.convolution.k_filter  # [W, to, from]
    assert len(found[0]["k"]) == 4 and found[0]["k"][1] == filters[:, 0, 1].tolist()
    model, found = of("deltanet:conv_type=head")
    assert found[1]["q"] == model.blocks[1].token_mixer.convolution.q_filter.tolist()
    assert of("deltanet")[1] == of("cat:streams=none")[1] == []
