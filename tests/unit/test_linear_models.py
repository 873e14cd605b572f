"""GLA, DeltaNet and Gated DeltaNet: definitions, names of the package, exports, backends, keys.

What every family must do is in test_families.py.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm import architectures
from cat_lm.config import load_config
from cat_lm.core.errors import UserError
from cat_lm.export import export_checkpoint
from cat_lm.mixers.kinds.gla import gated_linear_attention
from cat_lm.mixers.parts import linear
from cat_lm.ops.recurrence import backends
from cat_lm.ops.recurrence import decaying_scan_torch as scan
from cat_lm.ops.recurrence.backends import choose_backend
from cat_lm.ops.recurrence.decaying_scan_cpu import KERNEL
from cat_lm.ops.recurrence.delta_rule import delta_rule
from cat_lm.pretrained.loading import load_model
from cat_lm.training.building import build_model, describe_backend
from tests.finished_runs import checkpoint
from tests.unit.test_families import model_of, same, tokens
from tests.unit.test_recall_fla import PACKAGE

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ("gla", "delta_net", "gated_deltanet")
CASES = (*FAMILIES, "gla: short convolutions")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
convolving = pytest.mark.parametrize("case", CASES[1:])  # not GLA, which has no filters
each_family = pytest.mark.parametrize("family", FAMILIES)
needs_definitions = pytest.mark.skipif(PACKAGE is None, reason="fla-core is not installed")


# Names, sizes, files


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


@pytest.mark.parametrize("case", CASES)
def test_the_package_itself_has_them(case):
    """Where flash-linear-attention's models are installed; they build without a GPU."""
    pytest.importorskip("fla.models", reason="flash-linear-attention is not installed")
    import importlib

    family = architectures.get(case.partition(":")[0])
    model = model_of(case)
    settings = architectures.library_config(model.config).to_dict()
    theirs = importlib.import_module(f"fla.models.{family.name}")
    named = family.library_classes().causal_lm.__name__
    with torch.device("meta"):
        other = getattr(theirs, named)(getattr(theirs, named[:-11] + "Config")(**settings))
    shapes = {name: p.shape for name, p in other.named_parameters()}
    assert shapes == {name: p.shape for name, p in model.named_parameters()}


def test_the_rows_of_table_2_have_their_sizes():
    sizes = {"gla": 374_475_776, "delta_net": 374_362_112, "gated_deltanet": 379_764_350}
    for name, parameters in sizes.items():
        config = load_config(ROOT / f"configs/pretrain/{name}.yaml")
        assert config.train.max_tokens == 15_000_000_000 and config.optimizer.lr == 3e-4
        with torch.device("meta"):
            assert sum(p.numel() for p in build_model(config, 0).parameters()) == parameters


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_an_export_for_the_package_is_the_same_tensors(case, tiny_corpus, tmp_path):
    family, model = architectures.get(case.partition(":")[0]), model_of(case)
    checkpoint(tmp_path / "run", model, tiny_corpus / "tokenizer")
    out = export_checkpoint(tmp_path / "run", tmp_path / "out", library=True)
    settings = json.loads((out / "config.json").read_text())
    assert settings["model_type"] == family.library_type
    assert settings["architectures"] == [f"{family.library_prefix}ForCausalLM"]
    assert settings["fuse_norm"] is True and settings["hidden_act"] == "swish"
    assert settings["intermediate_size"] == 256 and settings["use_short_conv"] == (case != "gla")
    stored = load_file(out / "model.safetensors")
    assert stored.keys() == model.state_dict().keys()
    assert all(torch.equal(stored[n], value) for n, value in model.state_dict().items())
    # It is read here as ours, by evaluations and by a run that starts from it.
    again, rows = load_model(out, device="cpu"), tokens(2, 20)
    assert type(again) is family.classes().causal_lm
    assert torch.equal(again(rows).logits, model(rows).logits)
    theirs, ours = (family.section_values(m.config) for m in (again, model))
    assert theirs == ours and family.differences(theirs, ours) == []
    card = (out / "README.md").read_text()
    assert "import fla  #" in card and "import cat_lm" not in card


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("gla", {"feature_map": "relu"}, "feature_map='relu': models of this kind here have None"),
        ("gla", {"attn": {"layers": [0]}}, "attn={'layers': [0]}"),
        ("gla", {"fuse_norm": False}, "fuse_norm=False"),
        ("gla", {"num_heads": 3}, "num_heads=3: must divide 16 channels (expand_k=0.5 x hidden"),
        ("gla", {"use_short_conv": "no"}, "use_short_conv='no': must be true or false"),
        ("delta_net", {"use_gate": True}, "use_gate=True"),
        ("delta_net", {"expand_v": 0.3}, "expand_v=0.3: hidden_size=32 times it is 9.6 channels"),
        ("gated_deltanet", {"num_v_heads": 4}, "num_v_heads=4"),
        ("gated_deltanet", {"head_dim": 0}, "head_dim=0: must be from 1"),
        ("gated_deltanet", {"conv_size": 0}, "conv_size=0: must be from 1"),
        ("delta_net", {"conv_init": "identity"}, "conv_init='identity': must be 'normal'"),
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


def test_rates_and_filters_start_as_published():
    model = model_of("gated_deltanet", moved=False, num_heads=24, head_dim=8)
    layer = model.model.layers[1].attn
    steps, rates = F.softplus(layer.dt_bias), layer.A_log.exp()
    assert 0.9e-3 < steps.min() < 0.01 < steps.max() < 0.101
    assert 0 < rates.min() < 4 < 12 < rates.max() <= 16
    assert 0.015 < layer.g_proj.weight.std() < 0.025


def start_with(model: nn.Module, std: float) -> bool:
    """Tell whether filters, hundreds of numbers, have this standard deviation within a tenth."""
    taps = torch.cat([p.flatten() for name, p in model.named_parameters() if "conv1d" in name])
    return abs(float(taps.detach().std()) / std - 1) < 0.1


@convolving
def test_filters_start_as_the_packages_or_as_torchs(case):
    for keys, std in (({}, 0.02), ({"initializer_range": 0.05}, 0.05)):
        model = model_of(case, moved=False, **keys)
        assert start_with(model, std) and not start_with(model, 1 / math.sqrt(12))
    model = model_of(case, moved=False, conv_init="uniform")
    assert start_with(model, 1 / math.sqrt(12)) and not start_with(model, 0.02)  # W = 4: ±1/2
    weight = model.model.layers[0].attn.q_conv1d.weight.detach().abs()
    assert 0.45 < weight.max() <= 0.5


@pytest.mark.parametrize("case", ["gla: short convolutions", "delta_net"])
def test_a_mixer_without_parameters_gives_the_start_of_its_parts(case, monkeypatch):
    """Transformers passes over such modules; it decides after its parts, which say it too."""

    def given(self: nn.Module) -> dict[str, Tensor]:
        return {f"{s}_conv1d.weight": torch.zeros_like(self.q_conv1d.weight) for s in "qk"}

    monkeypatch.setattr(linear.LinearMixer, "initial_values", given, raising=False)
    model = model_of(case, moved=False)
    assert not any(getattr(model.model.layers[1].attn, f"{s}_conv1d").weight.any() for s in "qk")
    monkeypatch.undo()
    assert start_with(model_of(case, moved=False), 0.02)


@convolving
@pytest.mark.parametrize("library", [False, True])
def test_the_start_of_filters_is_exported_and_differs_in_no_weight(
    case, library, tiny_corpus, tmp_path
):
    family, model = architectures.get(case.partition(":")[0]), model_of(case, conv_init="uniform")
    checkpoint(tmp_path / "run", model, tiny_corpus / "tokenizer")
    out = export_checkpoint(tmp_path / "run", tmp_path / "out", library=library)
    again = load_model(out, device="cpu").config
    assert (
        json.loads((out / "config.json").read_text())["conv_init"] == again.conv_init == "uniform"
    )
    theirs, plain = (family.section_values(c) for c in (again, model_of(case).config))
    assert (theirs["conv_init"], plain["conv_init"]) == ("uniform", "normal")
    assert family.differences(theirs, plain) == []
    assert family.differences(theirs, plain | {"conv_size": 3})


# Backends


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


def test_torch_is_torch(monkeypatch):
    """Asked for by name, it takes the place of the kernel both ways."""
    calls: list[str] = []
    for name in ("forward", "backward"):
        computed = getattr(scan, name)
        monkeypatch.setattr(scan, name, lambda *a, _n=name, _f=computed: calls.append(_n) or _f(*a))
    q, k, v, decay = (torch.randn(1, 5, 2, 3, requires_grad=True) for _ in range(4))
    gated_linear_attention(q, k, v, F.logsigmoid(decay), backend="torch").sum().backward()
    assert calls == ["forward", "backward"]


@pytest.mark.parametrize(
    ("recurrence", "device", "dtype", "chosen"),
    [
        (backends.GLA, CUDA, torch.bfloat16, "fla"),
        (backends.GLA, CUDA, torch.float32, "triton"),
        (backends.SELECTIVE_SCAN, CUDA, torch.bfloat16, "triton"),
        (backends.DELTA_RULE, CUDA, torch.bfloat16, "fla"),
        (backends.GATED_DELTA_RULE, CUDA, torch.float32, "torch"),
        (backends.DELTA_RULE, CPU, torch.float32, "torch"),
        (backends.GLA, CPU, torch.float64, "torch"),
    ],
)
def test_what_auto_takes(recurrence, device, dtype, chosen, monkeypatch):
    monkeypatch.setattr(backends.triton_launch, "INSTALLED", True)
    monkeypatch.setattr(backends, "_has_fla", lambda: True)
    assert choose_backend(recurrence, device, dtype).name == chosen


def test_auto_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(backends.triton_launch, "INSTALLED", False)
    monkeypatch.setattr(backends, "_has_fla", lambda: False)
    choice = choose_backend(backends.GLA, CUDA, torch.bfloat16)
    assert choice.name == "torch" and "pip install fla-core" in choice.reason
    assert "triton is not installed" in choice.reason


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


def test_the_backend_is_named(tmp_path):
    config = run({"train.mixer_backend": "torch"}, tmp_path)
    model = build_model(config, 50)
    assert model.model.mixer_backend == "torch"
    said = "gated linear attention: torch, asked for by name; in fp32"
    assert describe_backend(config, model.config, CPU, "mixer_backend") == said
    plain = run({"model.architecture": "llama", "model.num_attention_heads": 2}, tmp_path)
    assert describe_backend(plain, build_model(plain, 50).config, CPU, "mixer_backend") == ""


def test_the_doctor_names_it(tmp_path):
    from launch.doctor.run_config import run_recurrences

    config = run({"train.mixer_backend": "torch", "model.vocab_size": 50}, tmp_path)
    (finding,) = run_recurrences(config)
    assert finding.text.startswith("gated linear attention: torch") and finding.problem is None
    plain = run({"model.architecture": "llama", "model.num_attention_heads": 2}, tmp_path)
    assert list(run_recurrences(plain)) == []


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_preflight_tries_a_kernel_where_recurrences_may_need_it(backend, tmp_path, monkeypatch):
    from cat_lm.training.preflight import facts

    monkeypatch.setattr(facts, "INSTALLED", True)
    monkeypatch.setattr(facts, "why_no_kernel", lambda where: f"tried on {where}")
    config = run({"train.conv_backend": "reference", "train.mixer_backend": backend}, tmp_path)
    tried = facts.kernel_problem(config, CUDA)
    assert (tried is None) == (backend == "torch")


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


# Keys


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.num_heads": 3}, "model.num_heads=3: must divide 16 channels"),
        ({"model.num_attention_heads": 4}, "model.num_attention_heads: unknown key"),
        ({"model.expand_k": 0.3}, "model.expand_k=0.3: hidden_size=32 times it is 9.6 channels"),
        (
            {"model.conv_init": "identity"},
            "model.conv_init='identity': should be 'normal' or 'uniform'",
        ),
        ({"model.conv_size": 8}, "model.conv_size=8: has no effect without use_short_conv"),
        ({"model.architecture": "delta_net"}, "model.num_heads: is missing"),
        (
            {"model.architecture": "gated_deltanet", "model.num_heads": 5},
            "model.num_heads=5: three quarters of hidden_size=32 do not divide among them",
        ),
        (
            {"model.architecture": "gated_deltanet", "model.num_heads": 2, "model.expand_v": 0.3},
            "model.expand_v=0.3: a head's 12 channels times it are 3.6",
        ),
    ],
)
def test_wrong_keys_are_one_clear_line(changes, said, tmp_path):
    with pytest.raises(UserError) as error:
        run(changes, tmp_path)
    assert said in str(error.value)
