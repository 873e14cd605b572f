"""Mamba and Mamba-2: the definition, the library's options, starts, precision, backends, errors.

What every family does is in test_families.py.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from cat_lm import architectures
from cat_lm.config import load_config
from cat_lm.core.errors import UserError
from cat_lm.mixers.kinds import mamba
from cat_lm.model import CatMamba2Config, CatMambaConfig
from cat_lm.model.context import Context
from cat_lm.model.sequence import SequenceGroup
from cat_lm.pretrained.loading import load_model, model_config
from cat_lm.training.building import build_model, describe_backend, load_initial_weights
from cat_lm.training.estimate import num_parameters
from tests.unit.test_families import family_of, model_of, relative, tokens

ROOT = Path(__file__).parents[2]
both = pytest.mark.parametrize("case", ["mamba", "mamba2"])
CPU = torch.device("cpu")

# Sizes


@pytest.mark.parametrize(("row", "parameters"), [("mamba", 385_565_696), ("mamba2", 382_387_712)])
def test_the_rows_have_their_sizes_and_recipe(row, parameters):
    config = load_config(ROOT / f"configs/pretrain/{row}.yaml")
    assert num_parameters(config, 0) == parameters
    assert config.train.max_tokens == 15_000_000_000 and config.optimizer.lr == 3e-4
    assert config.data.context_length == 2048


# Definitions


OPTIONS = {
    "mamba: biases": {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True},
    "mamba: sizes": {"expand": 3, "time_step_rank": 5, "conv_kernel": 2, "state_size": 7},
    "mamba: one tap": {"conv_kernel": 1, "layer_norm_epsilon": 1e-2},
    "mamba2: biases": {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True},
    "mamba2: one group": {"n_groups": 1, "conv_kernel": 2, "layer_norm_epsilon": 1e-2},
    "mamba2: limits": {"time_step_limit": (0.01, 0.5), "expand": 3, "n_groups": 4},
}


@pytest.mark.parametrize("case", OPTIONS)
@torch.no_grad()
def test_options_mean_what_they_mean_to_the_library(case):
    family = family_of(case)
    model = model_of(case.partition(":")[0], **OPTIONS[case])
    stock = family.library_classes().causal_lm(architectures.library_config(model.config)).eval()
    stock.load_state_dict(model.state_dict())
    rows = tokens(2, 25)
    assert relative(model(rows).logits, stock(rows, use_cache=False).logits) <= 1e-5
    assert family.section_values(model.config) == family.section_values(stock.config)


@pytest.mark.parametrize(("groups", "parts"), [(1, 4), (2, 4), (3, 2), (4, 2), (4, 12), (12, 3)])
def test_ranks_copy_no_other_heads_keys(groups, parts):
    """Among ranks that share sequences: of each head its group's, and room for no other groups."""
    model = model_of("mamba2", hidden_size=48, n_groups=groups)
    mixer = model.backbone.layers[0].mixer
    x = torch.randn(2, 5, groups * model.config.state_size).bfloat16()
    whole = x.unflatten(-1, (groups, -1)).repeat_interleave(12 // groups, dim=2).float()
    assert torch.equal(mixer._for_own_heads(x, None), whole)
    for rank in range(parts):
        group = SequenceGroup(parts, rank, None)
        own = mixer._for_own_heads(x, group)
        assert torch.equal(own, group.own(whole, 2))
        read = {head * groups // 12 for head in range(12)[group.span(12)]}
        heads = 1 if len(read) == 1 else len(read) * 12 // groups
        assert own.untyped_storage().nbytes() == heads * whole.nbytes // 12


# Starts and precision


@both
def test_steps_rates_and_outputs_start_as_published(case):
    wide = {"hidden_size": 256, "num_hidden_layers": 4}
    model = model_of(case, moved=False, **wide, rescale_prenorm_residual=True)
    mixer = model.backbone.layers[3].mixer
    bias = mixer.dt_proj.bias if case == "mamba" else mixer.dt_bias
    steps = F.softplus(bias.detach())
    assert steps.min() >= 0.00099 and steps.max() <= 0.101
    assert 0.005 < steps.log().mean().exp() < 0.02  # evenly in the logarithm: 0.01
    rates = mixer.A_log.detach().exp()
    torch.testing.assert_close(
        rates, torch.arange(1.0, rates.shape[-1] + 1).expand_as(rates), rtol=1e-6, atol=1e-5
    )
    assert (mixer.D == 1).all()
    bound = 1 / math.sqrt(512)
    for rescaled, factor in ((True, 0.5), (False, 1.0)):
        model = model_of(case, moved=False, **wide, rescale_prenorm_residual=rescaled)
        largest = float(model.backbone.layers[0].mixer.out_proj.weight.detach().abs().max())
        assert 0.95 * factor * bound < largest <= factor * bound
    assert abs(float(model.backbone.embeddings.weight.detach().std()) - 0.02) < 0.001


@both
def test_what_is_exponentiated_is_in_fp32(case, monkeypatch):
    """In bf16 Δ and its bias are summed, and states kept, in fp32; so is the residual stream."""
    scan, given = mamba.decaying_scan, []

    def recorded(q, k, v, rate, a, **how):
        given.append((v.dtype, rate.dtype, a.dtype, float(rate.detach().float().sum())))
        return scan(q, k, v, rate, a, **how)

    monkeypatch.setattr(mamba, "decaying_scan", recorded)
    model = model_of(case).to(torch.bfloat16)
    mixer, rows = model.backbone.layers[0].mixer, tokens(1, 9)
    hidden = model.backbone(rows, output_hidden_states=True).hidden_states
    assert {h.dtype for h in hidden[1:-1]} == {torch.float32}
    assert all(row[:3] == (torch.float32,) * 3 for row in given)
    cache = model(rows, use_cache=True).past_key_values
    assert cache.layers[0].recurrent["memory"].dtype == torch.float32
    # A bias that bf16 would round to another step: 5 + 2^-7 is 5 in bf16's sums.
    with torch.no_grad():
        bias = mixer.dt_proj.bias if case == "mamba" else mixer.dt_bias
        bias.fill_(2**-7)
        given.clear()
        (mixer.dt_proj if case == "mamba" else mixer.in_proj).weight.zero_()
        mixer(torch.ones(1, 1, 32, dtype=torch.bfloat16), Context())
    count = len(bias)
    assert given[0][3] == pytest.approx(count * math.log1p(math.exp(2**-7)), rel=1e-5)
    plain = model_of(case, residual_in_fp32=False).to(torch.bfloat16)
    hidden = plain.backbone(rows, output_hidden_states=True).hidden_states
    assert {h.dtype for h in hidden} == {torch.bfloat16}


# Backends


@both
def test_backends_compute_the_same_and_are_named(case):
    model, rows = model_of(case), tokens(2, 21)
    found = []
    for backend in ("auto", "cpu", "torch"):
        model.set_mixer_backend(backend)
        found.append(model(rows).logits)
        said = family_of(case).describe_backend(
            "mixer_backend", model.config, CPU, torch.float32, backend
        )
        assert "selective scan: torch, asked for" in said or backend != "torch"
    assert torch.equal(found[0], found[1])
    assert 0 < relative(found[2], found[0]) < 1e-5
    for backend in ("triton", "fla"):
        model.set_mixer_backend(backend)
        with pytest.raises(ValueError, match=f"backend='{backend}' cannot serve the selective"):
            model(rows)
    with pytest.raises(ValueError, match="backend='cuda': must be one of auto, torch, cpu"):
        model.set_mixer_backend("cuda")


def config_of(case: str, *overrides: str):
    keys = [f"model.{key}={value}" for key, value in (("architecture", case), ("hidden_size", 32))]
    path = ROOT / "configs/pretrain" / f"{case}.yaml"
    return load_config(path, [*keys, "model.num_hidden_layers=2", *overrides])


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("mamba", "backend='fla' cannot serve the selective scan"),
        ("mamba2", "backend='fla' cannot serve the selective scan"),
        ("pythia", "no recurrences"),
    ],
)
def test_a_backend_that_cannot_serve_is_one_line(case, said):
    folder = ROOT / "configs/pretrain"
    shrunk = ["model.hidden_size=128", "model.num_hidden_layers=1", "train.mixer_backend=fla"]
    config = load_config(folder / f"{case}.yaml", shrunk)
    with pytest.raises(UserError, match=f"train.mixer_backend=fla: .*{said}") as error:
        describe_backend(config, build_model(config, 0).config, CPU, "mixer_backend")
    assert "\n" not in str(error.value)


# Files of the library


@both
def test_a_run_goes_on_from_the_librarys_model(case, tmp_path):
    family, model = family_of(case), model_of(case)
    stock = family.library_classes().causal_lm(architectures.library_config(model.config)).eval()
    stock.save_pretrained(tmp_path)
    assert type(load_model(tmp_path)) is type(stock)
    assert architectures.find(model_config(tmp_path)) is family
    load_initial_weights(model, str(tmp_path))
    rows = tokens(1, 20)
    with torch.no_grad():
        assert relative(model(rows).logits, stock(rows, use_cache=False).logits) <= 1e-5
    other = model_of(case, state_size=6)
    with pytest.raises(UserError, match=r"model\.state_size is . there and 6 here"):
        load_initial_weights(other, str(tmp_path))


@both
def test_the_librarys_model_stays_its_own_where_a_package_takes_its_type(
    case, tmp_path, monkeypatch
):
    """As flash-linear-attention does, once it is imported, with the types of both."""
    family = family_of(case)
    stock = family.library_classes().causal_lm(architectures.library_config(model_of(case).config))
    stock.save_pretrained(tmp_path)
    taken = type("Taken", (PreTrainedConfig,), {"model_type": family.library_type})
    # What AutoConfig.register does, of this type alone and until the test's end.
    monkeypatch.setitem(CONFIG_MAPPING._extra_content, family.library_type, taken)
    assert type(AutoConfig.from_pretrained(tmp_path)) is taken
    assert type(model_config(tmp_path)) is type(stock.config)
    assert type(load_model(tmp_path)) is type(stock)


# Errors

WRONG = [
    ("mamba", "num_heads=2", "unknown key (it is one of model.architecture=delta_net"),
    ("mamba", "num_attention_heads=2", "num_attention_heads: unknown key"),
    ("mamba", "state_size=0", "model.state_size=0: must be from 1"),
    ("mamba", "time_step_rank=some", "time_step_rank='some': must be auto, or a whole number"),
    ("mamba", "time_step_rank=0", "time_step_rank=0: must be auto, or a whole number from 1"),
    ("mamba", "expand=0.5", "model.expand=0.5"),
    ("mamba", "time_step_min=0.2", "time_step_min=0.2: must be at most time_step_max=0.1"),
    ("mamba2", "head_dim=24", "head_dim=24: 2 heads of so many channels are not"),
    ("mamba2", "num_heads=3", "head_dim=64: 3 heads of so many channels are not"),
    ("mamba2", "n_groups=3", "n_groups=3: must divide the 1 heads"),
    ("mamba2", "time_step_limit=[1, 0.5]", "time_step_limit=[1, 0.5]: must be two numbers"),
    ("mamba2", "time_step_limit=[]", "time_step_limit=[]: must be two numbers from 0 up"),
    ("mamba2", "time_step_limit=0.5", "time_step_limit=0.5: must be two numbers from 0 up"),
    ("mamba2", "time_step_limit=[true, 2]", "time_step_limit=True: must be a number, not true"),
]


@pytest.mark.parametrize(("case", "override", "said"), WRONG)
def test_wrong_keys_are_one_clear_line(case, override, said):
    with pytest.raises(UserError) as error:
        config_of(case, f"model.{override}")
    assert said in str(error.value) and "\n" not in str(error.value)


WRONG_FIELDS = [
    (CatMambaConfig, {"hidden_act": "gelu"}, "hidden_act='gelu': use silu"),
    (CatMambaConfig, {"state_size": 0}, "state_size=0: must be from 1"),
    (CatMambaConfig, {"time_step_rank": -1}, "time_step_rank=-1: must be auto, or a whole number"),
    (CatMambaConfig, {"use_bias": "yes"}, "use_bias"),
    (CatMamba2Config, {"n_groups": 3}, "n_groups=3: must divide the 128 heads"),
    (
        CatMamba2Config,
        {"time_step_limit": [2.0, 1.0]},
        "time_step_limit=[2.0, 1.0]: must be two numbers",
    ),
]


@pytest.mark.parametrize(("kind", "changes", "said"), WRONG_FIELDS)
def test_wrong_configurations_are_refused(kind, changes, said, tmp_path):
    with pytest.raises(Exception, match=r"(?s).") as error:
        kind(**changes)
    assert said in str(error.value)
    settings = json.loads(kind().to_json_string()) | changes
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"config\.json cannot be used") as raised:
        model_config(tmp_path)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_bounds_of_steps_are_a_key():
    back = architectures.section_of(CatMamba2Config(time_step_limit=(0.0, 0.5)))
    assert back.time_step_limit == (0.0, 0.5) and back.num_heads is None
