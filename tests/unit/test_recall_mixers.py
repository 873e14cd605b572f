"""Every mixer against an independent loop or the library's own; all of them causal."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from cat_lm import mixers
from cat_lm.core.errors import UserError
from cat_lm.mixers import Setting, make_mixer
from cat_lm.model.attention.modules.map_mixing import attend_mixing_maps
from cat_lm.ops import depthwise_conv, head_conv, multihead_conv
from cat_lm.ops.convolution import kinds
from eval.recall.model import RecallModel, learned_filters

SPECIFICATIONS = [
    *mixers.names(),
    "cat:streams=k,init=identity",
    "cat:place=before,window=2",
    "cat:heads=4",
    "cat:heads=2,position=rope",
    "cat:position=learned",
    "landmark:block=4,top_k=1,local=1,heads=2",
    "lincat:streams=none",
    "attention:position=rope,heads=2",
    "attention:position=none",
    "mamba:init=zoology",
    "cat:heads=2,conv_type=multihead",
    "cat:heads=2,conv_type=multihead,conv_mixing=maps",
    "lincat:heads=2,conv_type=depthwise,activation=silu",
    "deltanet:streams=k,heads=1",
    "gated-deltanet:streams=none",
    "gla:heads=2",
]


def built(specification: str, width: int = 16, layer: int = 0, layers: int = 1) -> torch.nn.Module:
    torch.manual_seed(0)
    return make_mixer(specification).build(Setting(width, layer, layers)).eval()


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("specification", SPECIFICATIONS)
def test_no_mixer_reads_the_future_and_all_learn(specification, layer):
    mixer = built(specification, layer=layer, layers=2)
    x = torch.randn(2, 37, 16, requires_grad=True)
    y = mixer(x)
    assert y.shape == x.shape
    changed = x.detach().clone()
    changed[:, 20:] += torch.randn_like(changed[:, 20:])
    torch.testing.assert_close(mixer(changed)[:, :20], y[:, :20], rtol=1e-4, atol=1e-5)
    y.square().sum().backward()
    for name, parameter in mixer.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_cat_is_attention_over_filtered_streams():
    mixer = built("cat:streams=qkv,window=3")
    x = torch.randn(1, 7, 16)
    q, k, v = mixer.streams.projection(x)[0].chunk(3, dim=-1)
    filtered = []
    for name, stream in zip("qkv", (q, k, v), strict=True):
        taps = mixer.streams.filters[name][0]
        moved = [sum(taps[j] * stream[t - j] for j in range(3) if t >= j) for t in range(7)]
        filtered.append(torch.stack(moved))
    q, k, v = filtered
    rows = [(q[t] @ k[: t + 1].T / 4).softmax(0) @ v[: t + 1] for t in range(7)]
    torch.testing.assert_close(mixer(x)[0], mixer.out_proj(torch.stack(rows)))


def test_filters_before_the_projection_equal_filters_after_it_without_bias():
    after, before = built("cat:bias=false"), built("cat:bias=false,place=before")
    before.load_state_dict(after.state_dict())
    x = torch.randn(2, 9, 16)
    torch.testing.assert_close(after(x), before(x))


def test_identity_filters_start_as_attention_and_uniform_ones_are_bounded():
    cat, plain = built("cat:init=identity"), built("attention:position=none")
    plain.load_state_dict(
        {k.removeprefix("streams."): v for k, v in cat.state_dict().items() if "filters" not in k}
    )
    x = torch.randn(2, 9, 16)
    torch.testing.assert_close(cat(x), plain(x))
    taps = torch.cat([f.flatten() for f in built("cat:heads=16").streams.filters.values()])
    assert 0.9 / math.sqrt(3) < taps.abs().max() <= 1 / math.sqrt(3)


def heads_of(mixer: torch.nn.Module, x: torch.Tensor, heads: int) -> list[torch.Tensor]:
    """Queries, keys and values [B, T, H, D] before the filters."""
    return list(mixer.streams.projection(x).unflatten(-1, (3, heads, -1)).unbind(dim=2))


CONVOLUTIONS = {"head": head_conv, "depthwise": depthwise_conv, "multihead": multihead_conv}


@pytest.mark.parametrize("conv_type", CONVOLUTIONS)
@pytest.mark.parametrize("name", ["cat", "lincat"])
def test_filters_of_every_kind_are_the_models_operators(name, conv_type):
    mixer = built(f"{name}:heads=4,conv_type={conv_type},streams=qv")
    x = torch.randn(2, 9, 16)
    plain, found = heads_of(mixer, x, 4), mixer.streams(x)
    for stream, before, after in zip("qkv", plain, found, strict=True):
        if stream == "k":
            torch.testing.assert_close(after, before, rtol=0, atol=0)
            continue
        filters = mixer.streams.filters[stream]
        assert filters.shape == kinds.get(conv_type).filter_shape(4, 4, 3)
        wanted = CONVOLUTIONS[conv_type](before, filters, backend="reference")
        torch.testing.assert_close(after, wanted, rtol=1e-4, atol=1e-5)
    bound = 1 / math.sqrt(3 * (4 if conv_type == "multihead" else 1))
    assert 0.8 * bound < filters.abs().max() <= bound
    active = built(f"{name}:heads=4,conv_type={conv_type},streams=qv,activation=silu")
    active.load_state_dict(mixer.state_dict())
    for after, other in zip(found, active.streams(x), strict=True):
        torch.testing.assert_close(other, F.silu(after), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("conv_type", CONVOLUTIONS)
@pytest.mark.parametrize("name", ["deltanet", "gated-deltanet"])
def test_the_delta_rules_filters_of_every_kind(name, conv_type):
    layer = built(f"{name}:conv_type={conv_type},activation=none,heads=4")
    x = torch.randn(2, 9, 16)
    for stream in "qkv":
        before, filters = layer.projections[stream](x), layer.filters[stream]
        heads = 1 if conv_type == "depthwise" else 4
        wanted = CONVOLUTIONS[conv_type](
            before.unflatten(-1, (heads, -1)), filters, backend="reference"
        ).flatten(2)
        torch.testing.assert_close(layer._stream(stream, x), wanted, rtol=1e-4, atol=1e-5)
    start = built(f"{name}:conv_type={conv_type},init=identity,heads=4")
    plain = built(f"{name}:streams=none,heads=4")
    plain.load_state_dict(
        {k: v for k, v in start.state_dict().items() if not k.startswith("filters")}
    )
    torch.testing.assert_close(start(x), plain(x))


def test_mixed_maps_are_the_models():
    """The values moved by filters against the model's maps mixed as its definition reads."""
    mixer = built("cat:heads=4,conv_type=multihead,conv_mixing=maps,streams=kv")
    torch.nn.init.normal_(mixer.streams.projection.bias)
    x = torch.randn(2, 9, 16)
    q, k, v = heads_of(mixer, x, 4)
    filters = mixer.streams.filters
    k = multihead_conv(k, filters["k"], backend="reference")
    causal = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    query, key, value = (s.transpose(1, 2) for s in (q, k, v))
    y, _ = attend_mixing_maps(query, key, value, filters["v"], causal, scaling=0.5)
    torch.testing.assert_close(mixer(x), mixer.out_proj(y.flatten(2)), rtol=1e-4, atol=1e-5)
    embeddings = built("cat:heads=4,conv_type=multihead,streams=kv")
    embeddings.load_state_dict(mixer.state_dict())
    assert not torch.allclose(embeddings(x), mixer(x), atol=1e-3)
    start = built("cat:heads=4,conv_type=multihead,conv_mixing=maps,init=identity")
    plain = built("attention:position=none,heads=4")
    plain.load_state_dict(
        {k.removeprefix("streams."): v for k, v in start.state_dict().items() if "filters" not in k}
    )
    torch.testing.assert_close(start(x), plain(x), rtol=1e-4, atol=1e-5)


def test_linear_attention_is_the_running_sum():
    mixer = built("linear-attention")
    x = torch.randn(1, 6, 16)
    q, k, v = mixer.streams.projection(x)[0].chunk(3, dim=-1)
    q, k = F.elu(q) + 1, F.elu(k) + 1
    rows = []
    for t in range(6):
        weights = torch.stack([q[t] @ k[s] for s in range(t + 1)])
        rows.append(weights @ v[: t + 1] / weights.sum())
    torch.testing.assert_close(mixer(x)[0], mixer.out_proj(torch.stack(rows)))


def test_rotary_attention_sees_distances_alone():
    from cat_lm.mixers.modules.attention import rotate

    q, k = torch.randn(2, 1, 1, 1, 16).expand(-1, -1, 9, -1, -1)
    products = torch.einsum("bthd,bshd->ts", rotate(q), rotate(k))
    for distance in (0, 3):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert (products[5, 5] - products[5, 2]).abs() > 1e-3


def test_based_is_a_gated_convolution_then_taylor_attention():
    mixer = built("based", layer=0)
    x = torch.randn(1, 6, 16)
    moved = F.conv1d(
        F.pad(x.transpose(1, 2), (2, 0)), mixer.filters[0].flip(1)[:, None], groups=16
    ).transpose(1, 2)
    expected = (moved + mixer.bias) * mixer.projection(x) + x
    torch.testing.assert_close(mixer(x), expected)
    mixer = built("based:features=4", layer=1)
    q, k = mixer.qk_proj(x)[0].chunk(2, dim=-1)
    v, rows = mixer.v_proj(x)[0], []
    for t in range(6):
        s = torch.stack([q[t] @ k[i] for i in range(t + 1)]) / 2
        weights = 1 + s + s**2 / 2
        rows.append(weights @ v[: t + 1] / weights.sum())
    torch.testing.assert_close(mixer(x)[0], mixer.o_proj(torch.stack(rows)))


def recurrence(q, k, v, beta, decay):
    """The delta rule as it reads, one step at a time: [T, K], [T, V], [T]."""
    state, rows = torch.zeros(v.shape[1], q.shape[1], dtype=q.dtype), []
    for t in range(len(q)):
        state = decay[t] * state
        state = state + beta[t] * torch.outer(v[t] - state @ k[t], k[t])
        rows.append(state @ q[t] / math.sqrt(q.shape[1]))
    return torch.stack(rows)


@pytest.mark.parametrize("gated", [False, True])
def test_the_delta_rule_at_once_equals_step_by_step(gated):
    from cat_lm.ops.recurrence.delta_rule import delta_rule

    torch.manual_seed(0)
    q, k = torch.nn.functional.normalize(torch.randn(2, 2, 40, 2, 5).double(), dim=-1)
    v, beta = torch.randn(2, 40, 2, 7).double(), torch.rand(2, 40, 2).double()
    decay = -3 * torch.rand(2, 40, 2).double() if gated else None
    found = delta_rule(q, k, v, beta, decay)
    for b in range(2):
        for h in range(2):
            alpha = decay[b, :, h].exp() if gated else torch.ones(40)
            expected = recurrence(q[b, :, h], k[b, :, h], v[b, :, h], beta[b, :, h], alpha)
            torch.testing.assert_close(found[b, :, h], expected)


def test_mamba_equals_transformers_mamba():
    from transformers.models.mamba.modeling_mamba import MambaConfig, MambaMixer

    mixer = built("mamba", width=32)
    config = MambaConfig(hidden_size=32, state_size=16, conv_kernel=4, expand=2, time_step_rank=2)
    other = MambaMixer(config, layer_idx=0).eval()
    state = mixer.state_dict()
    state["conv1d.weight"] = state.pop("filters")[0].flip(1)[:, None]
    state["conv1d.bias"] = state.pop("conv_bias")[0]
    other.load_state_dict(state)
    x = torch.randn(2, 11, 32)
    found = other(x)
    found = found[0] if isinstance(found, tuple) else found
    torch.testing.assert_close(mixer(x), found, rtol=1e-4, atol=1e-5)


def test_mamba_keeps_its_time_scales_or_falls_into_the_trap():
    def model(specification):
        torch.manual_seed(0)
        return RecallModel(
            make_mixer(specification), vocabulary=9, d_model=64, positions=9, layers=None
        )

    own, trap = model("mamba"), model("mamba:init=zoology")
    steps = F.softplus(own.blocks[0].mixer.dt_proj.bias)
    assert 0.0009 < steps.min() < 0.003 and 0.04 < steps.max() < 0.11
    assert not trap.blocks[0].mixer.dt_proj.bias.any()
    ours, theirs = (dict(m.blocks[0].mixer.named_parameters()) for m in (own, trap))
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
    assert theirs["filters"].abs().max() > 0.45  # not a linear layer: left alone
    assert trap.positions is None and len(trap.blocks) == 2
    tokens = torch.randint(9, (2, 6))
    residual = own.eval().embedding(tokens)
    first, second = own.blocks
    residual = residual + first.mixer(first.norm(residual))
    out = own.norm(residual + second.mixer(second.norm(residual))) @ own.embedding.weight.T
    torch.testing.assert_close(own(tokens, torch.ones(2, 6).bool()), out.flatten(0, 1))


def test_the_model_around_a_mixer_is_zoologys():
    torch.manual_seed(0)
    mixer = make_mixer("attention")
    model = RecallModel(mixer, vocabulary=50, d_model=16, positions=12, layers=2).eval()
    tokens = torch.randint(50, (3, 12))
    scored = torch.rand(3, 12) < 0.4
    residual = model.embedding(tokens) + model.positions.weight
    first, second = model.blocks
    residual = residual + first.mixer(first.norm1(residual))
    residual = residual + first.norm2(residual)
    residual = residual + second.mixer(second.norm1(residual))
    out = model.norm(residual + second.norm2(residual))
    expected = (out @ model.embedding.weight.T)[scored]
    torch.testing.assert_close(model(tokens, scored), expected)
    big = RecallModel(mixer, vocabulary=900, d_model=64, positions=12, layers=2)
    assert abs(big.embedding.weight.std() - 0.02) < 1e-3
    assert abs(big.blocks[0].mixer.projection.weight.std() - 0.02) < 1e-3
    assert abs(big.blocks[0].mixer.out_proj.weight.std() - 0.01) < 1e-3
    assert not big.blocks[0].mixer.projection.bias.any()
    assert (
        RecallModel(make_mixer("cat"), vocabulary=9, d_model=16, positions=9, layers=None).positions
        is None
    )


def test_positions_of_cat():
    learned, plain = make_mixer("cat:position=learned"), make_mixer("cat")
    assert learned.learned_positions and not plain.learned_positions
    rotary, without = built("cat:position=rope,init=identity"), built("cat:init=identity")
    attention = built("attention:position=rope")
    state = rotary.state_dict()
    without.load_state_dict(state)
    attention.load_state_dict(
        {k.removeprefix("streams."): v for k, v in state.items() if "filters" not in k}
    )
    x = torch.randn(2, 9, 16)
    torch.testing.assert_close(rotary(x), attention(x))
    assert not torch.allclose(rotary(x), without(x))


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
    filters = model.blocks[0].mixer.streams.filters["k"]  # [W, to, from]
    assert len(found[0]["k"]) == 4 and found[0]["k"][1] == filters[:, 0, 1].tolist()
    model, found = of("deltanet:conv_type=head")
    assert found[1]["q"] == model.blocks[1].mixer.filters["q"].tolist()
    assert of("deltanet")[1] == of("cat:streams=none")[1] == []


@pytest.mark.parametrize(
    "specification,words",
    [
        ("dog", "must be one of attention"),
        ("cat:stream=k", "did you mean streams"),
        ("cat:streams=kk", "streams='kk'"),
        ("cat:init", "'init' must be key=value"),
        ("cat:heads=3", "do not divide d_model=16"),
        ("cat:heads=2,place=before", "needs heads=1"),
        ("cat:conv_type=1d", 'conv_type="1d": must be one of none, head, depthwise, multihead'),
        ("lincat:activation=relu", "activation='relu': choose one of none, silu"),
        ("deltanet:init=zeros", "init='zeros': choose one of uniform, identity"),
        ("cat:conv_mixing=heads", "conv_mixing='heads': choose one of embeddings, maps"),
        ("cat:conv_mixing=maps", "needs conv_type=multihead and the stream v"),
        ("cat:conv_mixing=maps,conv_type=multihead,streams=qk", "the stream v, whose filters"),
        ("lincat:conv_mixing=maps", "unknown option 'conv_mixing'"),
        ("attention:position=alibi", "must be learned, rope or none"),
        ("gla:operator=cuda", "operator='cuda': must be torch or fla"),
        ("deltanet:operator=", "operator='': must be torch or fla"),
        ("gated-deltanet:operator=fla", "unknown option 'operator'"),
        ("none:x=1", "it has none"),
    ],
)
def test_bad_specifications_are_one_clear_line(specification, words):
    with pytest.raises(UserError) as error:
        make_mixer(specification).build(Setting(16))
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["gla", "deltanet"])
def test_the_operator_of_a_package_that_is_not_here_or_not_for_this_tensor(name, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec

    def only(answer):
        """Of this package alone: torch looks for others when it is used first."""
        return lambda wanted, *rest: answer if wanted == "fla" else find(wanted, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", only(None))
    with pytest.raises(UserError, match=r"fla-core is not installed.*or use operator=torch"):
        make_mixer(f"{name}:operator=fla")
    monkeypatch.setattr(importlib.util, "find_spec", only("here"))
    assert make_mixer(f"{name}:operator=fla").label == f"{name}:operator=fla"
    layer = built(f"{name}:operator=fla")
    with pytest.raises(UserError, match="operator=fla: it needs a CUDA GPU, not cpu"):
        layer(torch.randn(2, 5, 16))
    with pytest.raises(UserError, match="cannot train models in a stack"):
        torch.func.vmap(layer)(torch.randn(3, 2, 5, 16))


def test_labels_name_what_differs():
    assert make_mixer("cat").label == "cat"
    assert make_mixer("cat:streams=k,window=3").label == "cat:streams=k"
