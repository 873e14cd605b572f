"""Recurrent families: their packages' names and options, initialization, backends and keys."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from cat_lm import architectures
from cat_lm.config import load_config
from cat_lm.core.errors import UserError
from cat_lm.mixers.kinds import mamba
from cat_lm.mixers.kinds.gla import gated_linear_attention
from cat_lm.mixers.parts import linear
from cat_lm.model.context import Context
from cat_lm.ops.recurrence import backends
from cat_lm.ops.recurrence.backends import choose_backend
from cat_lm.ops.recurrence.decaying_scan_cpu import KERNEL
from cat_lm.ops.recurrence.delta_rule import delta_rule
from cat_lm.pretrained.loading import load_model, model_config
from cat_lm.training.building import build_model, describe_backend, load_initial_weights
from cat_lm.training.estimate import num_parameters
from tests.cat_lm.architectures.test_families import family_of, model_of, relative, same, tokens

ROOT = Path(__file__).resolve().parents[3]
FAMILIES = ("gla", "delta_net", "gated_deltanet")
CASES = (*FAMILIES, "gla: short convolutions")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
both = pytest.mark.parametrize("case", ["mamba", "mamba2"])
each_family = pytest.mark.parametrize("family", FAMILIES)
PACKAGE = importlib.util.find_spec("fla")
needs_definitions = pytest.mark.skipif(PACKAGE is None, reason="fla-core is not installed")
LAYER = {"attn_norm.weight": "C", "mlp_norm.weight": "C", "attn.q_proj.weight": "KC"}
LAYER |= {"attn.k_proj.weight": "KC", "attn.v_proj.weight": "VC", "attn.o_proj.weight": "CV"}
LAYER |= {"mlp.gate_proj.weight": "IC", "mlp.up_proj.weight": "IC", "mlp.down_proj.weight": "CI"}
FILTERS = {"attn.q_conv1d.weight": "K1W", "attn.k_conv1d.weight": "K1W"}
FILTERS |= {"attn.v_conv1d.weight": "V1W"}
GATES = {"attn.g_proj.weight": "VC", "attn.gk_proj.0.weight": "RC", "attn.gk_proj.1.weight": "KR"}
GATES |= {"attn.gk_proj.1.bias": "K", "attn.g_norm_swish_gate.weight": "D"}
DELTA = FILTERS | {"attn.b_proj.weight": "HC", "attn.o_norm.weight": "D"}
DECAY = {"attn.a_proj.weight": "HC", "attn.A_log": "H", "attn.dt_bias": "H"}
NAMES = {"gla": GATES, "gla: short convolutions": GATES | FILTERS, "delta_net": DELTA}
NAMES["gated_deltanet"] = DELTA | DECAY | {"attn.g_proj.weight": "VC"}


@pytest.mark.parametrize("case", CASES)
def test_parameters_have_the_packages_names_and_shapes(case):
    model = model_of(case)
    keys, values = model.config.section.key_channels, model.config.section.value_channels
    sizes = {"C": 32, "K": keys, "V": values, "I": 256, "H": 2, "D": values // 2, "W": 4, "R": 16}
    sizes["1"] = 1
    layer = {n: tuple(sizes[axis] for axis in axes) for n, axes in (LAYER | NAMES[case]).items()}
    wanted = {f"model.layers.{i}.{n}": shape for i in range(2) for n, shape in layer.items()}
    wanted |= {"model.embeddings.weight": (257, 32), "model.norm.weight": (32,)}
    wanted |= {"lm_head.weight": (257, 32)}
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == wanted


SIZES = {"gla": 374_475_776, "delta_net": 374_362_112, "gated_deltanet": 379_764_350}
SIZES |= {"mamba": 385_565_696, "mamba2": 382_387_712}


@pytest.mark.parametrize("name", SIZES)
def test_configurations_have_the_published_sizes(name):
    config = load_config(ROOT / f"configs/pretrain/{name}.yaml")
    assert num_parameters(config, 0) == SIZES[name]
    assert config.train.max_tokens == 15_000_000_000 and config.optimizer.lr == 3e-4


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("gla", {"feature_map": "relu"}, "feature_map='relu': models of this kind here have None"),
        ("gla", {"fuse_norm": False}, "fuse_norm=False"),
        ("gla", {"num_heads": 3}, "num_heads=3: must divide 16 channels (expand_k=0.5 x hidden"),
        ("delta_net", {"expand_v": 0.3}, "expand_v=0.3: hidden_size=32 times it is 9.6 channels"),
        ("gated_deltanet", {"num_v_heads": 4}, "num_v_heads=4"),
        ("gated_deltanet", {"conv_size": 0}, "conv_size=0: must be from 1"),
    ],
)
def test_models_of_the_package_that_are_not_ours_are_refused(family, changes, said, tmp_path):
    model = model_of(family)
    model.save_pretrained(tmp_path)
    architecture = architectures.get(family)
    settings = architectures.library_config(model.config).to_dict() | changes
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError) as error:
        load_model(tmp_path)
    assert said in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(Exception, match=r"(?s).") as error:
        architecture.own_config(settings)
    assert said in str(error.value)


def test_channels_that_the_package_would_count_otherwise_are_no_export():
    """It cuts 100 x 0.29 off at 28; here 0.29 is what was written."""
    family = architectures.get("gla")
    config = family.config_class()(hidden_size=100, expand_k=0.29, num_heads=1)
    (problem,) = family.library_problems(config)
    assert problem.startswith("has expand_k=0.29,") and problem.endswith("28 channels and not 29")
    assert all(architectures.get(n).library_problems(model_of(n).config) == [] for n in FAMILIES)


def run(changes: dict[str, Any], tmp_path: Path) -> Any:
    values = {
        "model": {"architecture": "gla", "hidden_size": 32, "num_hidden_layers": 1},
        "data": {"path": "data", "context_length": 64},
        "optimizer": {"lr": 0.001},
        "train": {"max_steps": 4, "global_batch_size": 4, "micro_batch_size": 4},
    }
    values["train"] |= {"output_dir": "out", "precision": "fp32"}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        values[section][name] = value
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(values))
    return load_config(path)


@pytest.mark.parametrize("case", CASES)
def test_a_backend_by_name_computes_the_same_or_says_why_not(case):
    model, rows = model_of(case), tokens(2, 40)
    expected = model(rows).logits
    serving = {"torch"} | ({"cpu"} if case.startswith("gla") and KERNEL.is_built else set())
    for name in backends.NAMES:
        model.set_mixer_backend(name)
        if name in serving:
            same(model(rows).logits, expected)
        else:
            with pytest.raises(ValueError, match=f"backend='{name}' cannot serve the|gated"):
                model(rows)
    with pytest.raises(ValueError, match="backend='cuda': must be one of auto, torch, cpu"):
        model.set_mixer_backend("cuda")


@pytest.mark.parametrize(
    ("recurrence", "device", "dtype", "chosen"),
    [
        (backends.GLA, CUDA, torch.bfloat16, "fla"),
        (backends.GLA, CUDA, torch.float32, "triton"),
        (backends.SELECTIVE_SCAN, CUDA, torch.bfloat16, "triton"),
        (backends.DELTA_RULE, CUDA, torch.bfloat16, "fla"),
        (backends.GATED_DELTA_RULE, CUDA, torch.float32, "torch"),
        (backends.DELTA_RULE, CPU, torch.float32, "torch"),
    ],
)
def test_what_auto_takes(recurrence, device, dtype, chosen, monkeypatch):
    monkeypatch.setattr(backends.triton_launch, "INSTALLED", True)
    monkeypatch.setattr(backends, "_has_fla", lambda: True)
    assert choose_backend(recurrence, device, dtype).name == chosen


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train.mixer_backend": "fla"}, "train.mixer_backend=fla: backend='fla' cannot serve"),
        ({"train.mixer_backend": "cpu", "model.architecture": "delta_net", "model.num_heads": 2},
         "train.mixer_backend=cpu: backend='cpu' cannot serve the delta rule: the delta rule has"),
        ({"train.mixer_backend": "torch", "model.architecture": "mixer", "model.mixer": "gla"},
         "train.mixer_backend=torch: a mixer chooses what computes it"),
        ({"train.mixer_backend": "cpu", "model.architecture": "llama",
          "model.num_attention_heads": 2},
         "train.mixer_backend=cpu: the model has no recurrences"),
    ],
)  # fmt: skip
def test_a_backend_that_cannot_serve_ends_the_run(changes, said, tmp_path):
    config = run(changes, tmp_path)
    with pytest.raises(UserError) as error:
        describe_backend(config, build_model(config, 50).config, CPU, "mixer_backend")
    assert str(error.value).startswith(said)


# The package's chunked operators, and what they call the streams of ours, in order.
CHUNKED = {
    "gla": ("q", "k", "v", "g"),
    "delta_rule": ("q", "k", "v", "beta"),
    "gated_delta_rule": ("q", "k", "v", "beta", "g"),
}
HOW = ("initial_state", "output_final_state", "cu_seqlens")


@needs_definitions
@pytest.mark.parametrize(("name", "streams"), CHUNKED.items())
def test_the_package_names_its_streams_so(name, streams):
    """By its source, as it imports where a GPU is."""
    path = Path(PACKAGE.submodule_search_locations[0], "ops", name, "chunk.py")
    (found,) = (
        node.args
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name == f"chunk_{name}"
    )
    taken = [argument.arg for argument in found.args]
    needed = set(taken[: len(taken) - len(found.defaults)])
    assert needed <= set(streams) and {*streams, *HOW} <= set(taken)


def by_documents(name: str, plain: Any) -> Any:
    """The package's chunked operators as they are called: packed documents by their borders."""

    def operator(
        *, initial_state: Any, output_final_state: bool, cu_seqlens: Any = None, **streams: Tensor
    ) -> Any:
        assert set(streams) == set(CHUNKED[name])
        streams = {stream: streams[stream] for stream in CHUNKED[name]}
        assert cu_seqlens is None or len(streams["q"]) == 1
        borders = [0, streams["q"].shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        found = []
        for i, (start, end) in enumerate(itertools.pairwise(borders)):
            part = {name: s[:, start:end] for name, s in streams.items()}
            state = initial_state
            if initial_state is not None and cu_seqlens is not None:
                state = initial_state[i : i + 1]
            found.append(plain(*part.values(), initial_state=state, return_state=True))
        y, states = zip(*found, strict=True)
        return torch.cat(y, dim=1), torch.cat(states) if output_final_state else None

    return operator


@each_family
@torch.no_grad()
def test_the_packages_operators_get_documents_padding_and_states(family, monkeypatch):
    """With plain operators in the place of theirs, which need a GPU."""

    def gated(q, k, v, beta, g, **how):
        return delta_rule(q, k, v, beta, g, **how)

    plain = {"gla": gated_linear_attention, "delta_rule": delta_rule, "gated_delta_rule": gated}
    for name, operator in plain.items():
        module = SimpleNamespace(**{f"chunk_{name}": by_documents(name, operator)})
        monkeypatch.setitem(sys.modules, f"fla.ops.{name}", module)
    model, rows = model_of(family), tokens(2, 30)
    ids = torch.cat([torch.zeros(2, 7), torch.ones(2, 1), 2 * torch.ones(2, 22)], dim=1).long()
    how = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    expected = [model(rows, document_ids=ids).logits, model.generate(rows, **how)]
    choice = backends.BackendChoice("fla", "for the test")
    monkeypatch.setattr(linear.backends, "choose_backend", lambda *_: choice)
    model.set_mixer_backend("fla")
    found = [model(rows, document_ids=ids).logits, model.generate(rows, **how)]
    same(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


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


WRONG = [
    ("gla", "expand_k=0.3", "expand_k=0.3: hidden_size=1024 times it is 307.2 channels"),
    ("gla", "conv_init=identity", "conv_init='identity': should be 'normal' or 'uniform'"),
    ("gla", "conv_size=8", "model.conv_size=8: has no effect without use_short_conv"),
    ("delta_net", "num_heads=null", "model.num_heads"),
    ("gated_deltanet", "expand_v=0.3", "expand_v=0.3: a head's 256 channels times it are 76.8"),
    ("mamba", "num_heads=2", "unknown key (it is one of model.architecture=delta_net"),
    ("mamba", "num_attention_heads=2", "num_attention_heads: unknown key"),
    ("mamba", "state_size=0", "model.state_size=0: must be from 1"),
    ("mamba", "time_step_rank=some", "time_step_rank='some': must be auto, or a whole number"),
    ("mamba", "time_step_min=0.2", "time_step_min=0.2: must be at most time_step_max=0.1"),
    ("mamba2", "head_dim=24", "head_dim=24: "),
    ("mamba2", "num_heads=3", "head_dim=64: 3 heads of so many channels are not"),
    ("mamba2", "n_groups=3", "n_groups=3: must divide the 32 heads"),
    ("mamba2", "time_step_limit=[1, 0.5]", "time_step_limit=[1, 0.5]: must be two numbers"),
    ("mamba2", "time_step_limit=0.5", "time_step_limit=0.5: must be two numbers from 0 up"),
    ("mamba2", "time_step_limit=[true, 2]", "time_step_limit=True: must be a number, not true"),
]


@pytest.mark.parametrize(("name", "override", "said"), WRONG)
def test_wrong_key_is_one_line(name, override, said):
    with pytest.raises(UserError) as error:
        load_config(ROOT / f"configs/pretrain/{name}.yaml", [f"model.{override}"])
    assert said in str(error.value) and "\n" not in str(error.value)
