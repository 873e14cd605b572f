"""eval.speed: what is timed is right, what is wrong is refused, and the records say what they hold.

No test looks at how long anything took.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch

from cat_lm import architectures
from cat_lm.ops.convolution import kinds as kinds_table
from cat_lm.training.engine import Engine
from cat_lm.training.estimate import count_parameters, flops_per_token
from eval.speed import choices, machine
from eval.speed.__main__ import main
from eval.speed.choices import KERNELS
from eval.speed.conv import check, kernels, qkv
from eval.speed.conv.contest import against_rival
from eval.speed.conv.floor import forward_backward_bytes, forward_bytes
from eval.speed.conv.kernels import ConvCase, Kernel
from eval.speed.model import build as models
from eval.speed.model import decode, rotation, train
from eval.speed.timing import WARM_UPS, summary, time_in_turn, times_as_fast
from tests.distributed.ranks import run_on_ranks

TINY = ("--layers", 1, "--hidden-size", 32, "--heads", 2, "--vocab-size", 61, "--window", 3)
CPU = torch.device("cpu")


@pytest.fixture
def speed(monkeypatch, capsys, tmp_path):
    """Runs the command: its exit code, record (None where none was written), stdout and stderr."""
    monkeypatch.setitem(machine._LARGE_COPY_BYTES, "cpu", 2**20)

    def run(*arguments: object) -> tuple[int, dict | None, str, str]:
        path = tmp_path / "record.json"
        path.unlink(missing_ok=True)
        options = ("--device", "cpu", "--json", path)
        monkeypatch.setattr(sys, "argv", ["eval.speed", *map(str, (*arguments, *options))])
        code = 0
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code or 0
        record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        return code, record, *capsys.readouterr()

    return run


def test_a_cpus_tensors_keep_their_memory_while_they_are_timed(monkeypatch):
    kept = []
    monkeypatch.setattr(machine, "keep_freed_memory", lambda: kept.append("kept"))
    assert machine.open_device("cpu", None) == CPU
    assert kept == ["kept"]


def conv_arguments(**changes: str) -> list[str]:
    options = {"shape": "2,40,3,8", "windows": "3", "dtype": "float32", "repeats": "2"} | changes
    return ["conv", *(f"--{name.replace('_', '-')}={value}" for name, value in options.items())]


def conv_case(**changes) -> ConvCase:
    return replace(ConvCase("head", 2, 12, 3, 4, 5, "float32", "cpu"), **changes)


# The expectation


def loop_over_numbers(conv_type, x, filters, dy):
    """y, dx and dfilters, one product of three numbers at a time."""
    y, dx, dfilters = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(filters)
    batch, time, heads, width = x.shape
    for b, t, h, d in torch.cartesian_prod(*map(torch.arange, (batch, time, heads, width))):
        window = filters.shape[0 if conv_type == "multihead" else -1]
        for lag in range(min(window, int(t) + 1)):
            for other in range(heads) if conv_type == "multihead" else [h]:
                tap = {
                    "head": (h, lag),
                    "depthwise": (h, d, lag),
                    "multihead": (lag, h, other),
                }[conv_type]
                y[b, t, h, d] += filters[tap] * x[b, t - lag, other, d]
                dx[b, t - lag, other, d] += filters[tap] * dy[b, t, h, d]
                dfilters[tap] += dy[b, t, h, d] * x[b, t - lag, other, d]
    return {"y": y, "dx": dx, "dfilters": dfilters}


@pytest.mark.parametrize("conv_type", ["head", "depthwise", "multihead"])
@pytest.mark.parametrize(("time", "window"), [(6, 3), (2, 4), (1, 1)])
def test_expected_results_are_the_definition(conv_type, time, window):
    case = conv_case(conv_type=conv_type, batch=2, time=time, heads=2, head_dim=3, window=window)
    torch.manual_seed(0)
    x, dy = torch.randn(2, *case.shape, dtype=torch.float64)
    filters = torch.randn(case.filter_shape, dtype=torch.float64)
    expected = loop_over_numbers(conv_type, x, filters, dy)
    found = check.expected_results(conv_type, x, filters, dy)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12)


def test_expected_step_is_transformers_rotation_after_the_convolution():
    from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb

    case = conv_case(conv_type="qkv", head_dim=16)
    inputs = qkv.Inputs(case, seed=0)
    cosines, sines = (angle.double() for angle in inputs.rotary)
    outputs = []
    learned = [tensor.detach().double().requires_grad_() for tensor in inputs.learned]
    packed, *filters, bias = learned
    for index in range(3):
        x = packed[:, :, :, index]
        y = bias[:, index] + torch.zeros_like(x)
        for lag in range(case.window):
            delayed = torch.nn.functional.pad(x, (0, 0, 0, 0, lag, 0))[:, : case.time]
            y = y + filters[index][:, lag, None] * delayed
        outputs.append(y.transpose(1, 2))
    outputs[:2] = apply_rotary_pos_emb(*outputs[:2], cosines, sines)
    outputs = [output.transpose(1, 2) for output in outputs]
    upstream = [gradient.double() for gradient in inputs.gradients]
    gradients = torch.autograd.grad(outputs, learned, upstream)
    found = qkv.expected_results(inputs)
    assert set(found) == {*"qkv", *qkv.GRADIENTS}
    names = (*"qkv", *qkv.GRADIENTS)
    for name, tensor in zip(names, [*outputs, *gradients], strict=True):
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-9)


def test_floors_count_each_tensor_once_a_pass():
    assert forward_bytes(100, 100, 7) == 207
    # Forward; then dy, x and filters in, dx and dfilters out.
    assert forward_backward_bytes(100, 100, 7, 5) == 207 + 100 + 100 + 7 + 100 + 5
    inputs = qkv.Inputs(conv_case(conv_type="qkv"), seed=0)
    packed = 4 * 2 * 12 * 3 * 3 * 4
    constants = 4 * (3 * 3 * 5 + 3 * 3 * 4) + 2 * 4 * 12 * 2
    assert inputs.floors()["forward"] == 2 * packed + constants


# Kernels


def test_choices_are_what_is_there():
    from cat_lm.ops import BACKENDS

    assert tuple(kernels._FINDERS) == KERNELS
    assert set(BACKENDS) <= set(KERNELS)
    assert choices.conv_types() == (*kinds_table.names(), "qkv")


@pytest.mark.parametrize("conv_type", ["head", "depthwise", "multihead", "qkv"])
def test_conv_record(speed, conv_type):
    names = ["reference", "cpu", "conv1d"]
    arguments = conv_arguments(
        conv_type=conv_type, windows="1,5", dtype="float32,bfloat16", kernels=",".join(names)
    )
    code, record, out, err = speed(*arguments)
    assert code == 0, err
    assert (record["benchmark"], record["repeats"], record["refused"]) == ("conv", 2, [])
    assert record["device"]["type"] == "cpu" and record["device"]["threads"] >= 1
    assert {"command", "date", "versions", "commit", "machine"} <= set(record)
    cases = [(c["case"]["dtype"], c["case"]["window"]) for c in record["cases"]]
    assert cases == [("float32", 1), ("float32", 5), ("bfloat16", 1), ("bfloat16", 5)]
    layouts = {f"conv1d, {layout}" for layout in ("padded", "channels last", "transposed")}
    expected = {"reference", "cpu", "conv1d", *layouts}
    if conv_type == "qkv":
        expected = {f"{name}, in {way}" for name in names[:2] for way in ("one call", "parts")}
    for result in record["cases"]:
        assert {row["kernel"] for row in result["kernels"]} == expected
        assert result["backend"].keys() == {"name", "reason", "runs"}
        for direction in ("forward", "forward_backward"):
            rivals = {row[direction]["rival"] for row in result["kernels"]}
            assert len(rivals) == 1 and (rivals == {None}) == (conv_type == "qkv")
        for row in result["kernels"]:
            assert row["kernel"] in out
            for direction, floor in result["floor_bytes"].items():
                timed = row[direction]
                assert len(timed["seconds"]["all"]) == 2
                rate = floor / timed["seconds"]["median"]
                assert timed["bytes_per_second"] == pytest.approx(rate)
                share = rate / result["copy_bytes_per_second"]
                assert timed["of_copy_bandwidth"] == pytest.approx(share)


def test_absent_kernels_say_why(speed):
    code, record, out, _ = speed(*conv_arguments(kernels="cpu,triton,fla,causal-conv1d"))
    (result,) = record["cases"]
    assert code == 0
    assert set(result["absent"]) == {"triton", "fla", "causal-conv1d"}
    assert result["absent"]["fla"] == "runs on a GPU only"
    assert all(f"absent: {name}: {why}" in out for name, why in result["absent"].items())


@pytest.mark.parametrize("conv_type", ["head", "depthwise"])
def test_other_libraries_are_given_what_they_document(speed, monkeypatch, conv_type):
    """Both say what they equal in torch's terms; that stands in for them where no GPU is."""

    def causal_conv1d_fn(x, weight, bias=None):
        padding = weight.shape[1] - 1
        y = torch.nn.functional.conv1d(x, weight[:, None], bias, padding=padding, groups=x.shape[1])
        return y[..., : x.shape[2]]

    def causal_conv1d(x, weight=None, bias=None, backend="triton"):
        assert x.is_contiguous() and weight.is_contiguous() and backend == "triton"
        return causal_conv1d_fn(x.transpose(1, 2), weight, bias).transpose(1, 2), None

    stand_ins = {"causal_conv1d": causal_conv1d, "causal_conv1d_fn": causal_conv1d_fn}
    monkeypatch.setattr(kernels, "_import_for_gpu", lambda case, _, function: stand_ins[function])
    code, record, out, _ = speed(
        *conv_arguments(kernels="fla,causal-conv1d", conv_type=conv_type, dtype="bfloat16")
    )
    assert code == 0, out
    names = [row["kernel"] for row in record["cases"][0]["kernels"]]
    assert names == ["fla", "causal-conv1d", "causal-conv1d, channels last"]


def shifted(y):
    return torch.nn.functional.pad(y, (0, 0, 0, 0, 1, 0))[:, :-1]


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return 1.05 * dy


def one_wrong_element(y):
    return torch.index_fill(y, 1, torch.tensor([y.shape[1] - 1]), 0.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (shifted, "y is off"),
        (WrongGradient.apply, "dx is off"),
        (one_wrong_element, "y is off"),
        (lambda y: y * float("nan"), "y is off by nan"),
        (lambda y: y[:, 1:], "failed with RuntimeError"),
    ],
    ids=["late by one", "gradient", "last element", "nan", "shape"],
)
def test_wrong_kernel_is_refused(speed, monkeypatch, spoil, named, dtype):
    from cat_lm.ops import head_conv

    def convolve(x, filters):
        return spoil(head_conv(x, filters, backend="reference"))

    wrong = Kernel("wrong", "a kernel that is wrong on purpose", convolve)
    monkeypatch.setitem(kernels._FINDERS, "cpu", lambda case: [wrong])
    arguments = conv_arguments(kernels="cpu,conv1d", dtype=dtype, shape="2,300,3,8")
    code, record, out, err = speed(*arguments)
    assert code == 1
    (refused,) = record["refused"]
    assert refused["kernel"] == "wrong" and refused["reason"].startswith(named)
    rows = {row["kernel"]: row for row in record["cases"][0]["kernels"]}
    assert "forward" not in rows["wrong"] and "forward_backward" not in rows["wrong"]
    assert rows["conv1d"]["refused"] is None and rows["conv1d"]["forward"]["seconds"]["median"] > 0
    assert "refused: wrong: " in out
    assert err.endswith("error: 1 kernels are wrong and refused\n")


def test_wrong_step_is_refused(speed, monkeypatch):
    in_one_call = qkv.ops.head_conv_qkv

    def unrotated(*arguments, rotary, **options):
        return in_one_call(*arguments, rotary=None, **options)

    monkeypatch.setattr(qkv.ops, "head_conv_qkv", unrotated)
    code, record, _, _ = speed(*conv_arguments(conv_type="qkv", kernels="reference"))
    assert code == 1
    (refused,) = record["refused"]
    assert refused["kernel"] == "reference, in one call"
    assert refused["reason"].startswith("q is off") and "; v is off" not in refused["reason"]


# Timing


def test_calls_take_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    timings = time_in_turn(calls, CPU, repeats=3, min_seconds=0, warm_ups=2)
    assert "".join(order) == "aabb" + "ab" * 3
    assert all(len(timing.seconds) == 3 for timing in timings.values())


def test_short_calls_are_repeated_within_a_round():
    count = 0

    def call():
        nonlocal count
        count += 1

    timing = time_in_turn({"call": call}, CPU, repeats=2, min_seconds=0.001, warm_ups=1)["call"]
    assert timing.calls_a_repeat > 1
    assert count == 1 + 2 * timing.calls_a_repeat


def test_summary():
    assert summary([4.0, 1.0, 2.0, 3.0, 5.0]) == {
        "median": 3.0,
        "quartiles": [2.0, 4.0],
        "range": [1.0, 5.0],
        "all": [4.0, 1.0, 2.0, 3.0, 5.0],
    }
    assert summary([2.0])["quartiles"] == [2.0, 2.0]


def test_ratios_are_taken_within_a_round():
    """One round was ten times slower for both."""
    ratio = times_as_fast([1.0, 10.0, 2.0], [2.0, 20.0, 2.0])
    assert (ratio["median"], ratio["range"]) == (2.0, [1.0, 2.0])


def test_the_rival_is_the_layout_that_is_fastest():
    seconds = {"cpu": [1.0, 1.0, 2.0], "conv1d": [9.0, 9.0, 9.0], "conv1d, padded": [3.0, 4.0, 2.0]}
    found = against_rival(seconds)
    assert {row["rival"] for row in found.values()} == {"conv1d, padded"}
    assert found["cpu"]["times_as_fast_as_conv1d"] == 3.0
    assert found["cpu"]["times_as_fast_range"] == [1.0, 4.0]
    alone = against_rival({"cpu": [1.0]})["cpu"]
    assert alone["rival"] is alone["times_as_fast_range"] is None


# Training


def test_train_record(speed):
    names = ("pythia", "mh_cat")
    code, record, out, err = speed(
        *("train", *TINY, "--context-length", 16, "--batch-size", 2, "--repeats", 2),
        *("--models", ",".join(names), "--peak-tflops", 0.5),
    )
    assert code == 0, err
    assert tuple(record["results"]) == names
    assert set(record["largest_relative_logit_difference"]) == {"pythia", "mh_cat"}
    assert max(record["largest_relative_logit_difference"].values()) < 1e-5
    for name, row in record["results"].items():
        size = models.ModelSize(1, 32, 2, 61, 3, "float32", "cpu")
        model = models.build(size, name, 16)
        assert row["parameters"] == count_parameters(model)
        flops = 32 * flops_per_token(models.model_config(size, name, 16), row["parameters"], 16)
        assert row["flops_per_step"] == flops
        seconds = row["step_seconds"]["median"]
        assert row["tokens_per_second"] == pytest.approx(32 / seconds)
        assert row["mfu"] == pytest.approx(flops / seconds / 0.5e12)
        assert row["peak_memory_bytes"] >= 0
        assert row["model"] in out
    pythia = record["results"]["pythia"]
    assert pythia["relative_to_plain"] == 1 and pythia["relative_range"] == [1, 1]
    assert pythia["relative_to_pythia"] == 1 and pythia["relative_to_pythia_range"] == [1, 1]
    assert record["step"] == "forward and backward" and record["absent"] == {}
    assert record["results"]["mh_cat"]["convolution"].startswith("multihead convolution")


def steps_of_runs(ranks) -> dict:
    """What `train --optimizer` measures, with the rates that its optimizers were given."""
    engine, rates = Engine.train_step, []

    def train_step(self, batch, lr):
        rates.append((lr, self.config.optimizer.grad_clip, self.config.train.zero_stage))
        return engine(self, batch, lr)

    size = models.ModelSize(1, 32, 2, 61, 3, "bfloat16", "cpu")
    case = train.TrainCase(size, 2, 16, optimizer=True)
    with (
        mock.patch("cat_lm.training.distributed.start") as start,
        mock.patch.object(Engine, "train_step", train_step),
    ):
        start.return_value.__enter__.return_value = ranks
        record = train.train_speed(case, ("llama-stock",), 1, peak_memory=False)
    return {**record, "rates": rates}


def test_a_run_s_own_step_is_timed():
    """Of transformers' own class too, whose norms do not say what decays."""
    (record,) = run_on_ranks(steps_of_runs, 1)
    assert record["step"].startswith("a run's own")
    assert set(record["rates"]) == {(0.0, 1.0, 1)} and len(record["rates"]) == 1 + WARM_UPS
    assert record["results"]["llama-stock"]["peak_memory_bytes"] is None


def test_a_run_s_step_is_where_training_is(speed):
    device = mock.MagicMock()
    device.__enter__.return_value.device = torch.device("cuda", 0)
    with mock.patch("cat_lm.training.distributed.start", return_value=device):
        code, record, _, err = speed("train", *TINY, "--optimizer", "--models", "pythia")
    assert (code, record) == (2, None)
    assert "--device cpu: a run's own step is on cuda here" in err.splitlines()[-1]


# The rotation, compiled


def test_the_rotation_is_compiled_for_its_model_alone(monkeypatch):
    calls = []

    def compile_(eager, dynamic):
        def rotate(*arguments):
            calls.append(arguments[0].shape)
            return eager(*arguments)

        return rotate

    monkeypatch.setattr(torch, "compile", compile_)
    size = models.ModelSize(2, 32, 2, 61, 3, "float32", "cpu")
    names = ("pythia", "pythia-compiled-rotary", "stock")
    built = {name: models.build(size, name, 16) for name in names}
    ids = models.random_ids(size, 2, 9)
    assert rotation.compile_rotation(built[names[1]], ids) is None
    assert len(calls) == 2 and all(p.grad is None for p in built[names[1]].parameters())
    assert models.check_logits(built, ids, "float32")[names[1]] < 1e-5
    assert len(calls) == 4  # of two layers; the other models rotate as they did
    assert not MODELS["pythia"].compiled_rotation and MODELS[names[1]].stock == "stock"


def test_what_does_not_compile_is_absent(speed, monkeypatch):
    def compile_(eager, dynamic):
        def rotate(*arguments):
            raise RuntimeError("no C++ compiler\nwas found")

        return rotate

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(train, "_peak_memories", lambda case, names: dict.fromkeys(names, 0))
    few = (*TINY, "--context-length", 16, "--batch-size", 2, "--repeats", 1, "--models")
    code, record, out, err = speed("train", *few, "pythia,pythia-compiled-rotary")
    assert code == 0 and record["results"].keys() == {"pythia"}
    reason = "torch.compile failed: RuntimeError: no C++ compiler was found"
    assert record["absent"] == {"pythia-compiled-rotary": reason}
    assert f"absent: pythia-compiled-rotary: {reason}" in out
    code, record, out, err = speed("train", *few, "pythia-compiled-rotary")
    assert (code, record, out) == (2, None, "")
    assert err.splitlines()[-1] == f"error: --models: pythia-compiled-rotary: {reason}"
    code, record, out, err = speed("train", *few, "llama-compiled-rotary", "--compile")
    assert code == 2 and "--compile compiles the rotation of every model" in err


MODELS = choices.models()


def test_models_are_all_variants_of_all_families():
    assert tuple(MODELS)[:5] == ("pythia", "cat", "depthwise", "mh_cat", "cat_exp")
    assert tuple(MODELS)[5:7] == ("cat_ssm", "stock")
    for family in map(architectures.get, architectures.names()):
        own = [m for name, m in MODELS.items() if (m.architecture, name) != (family.name, m.stock)]
        own = [model for model in own if not model.compiled_rotation]
        of_it = [model.variant for model in own if model.architecture == family.name]
        assert of_it == list(family.variants())
        stocks = {m.stock for m in MODELS.values() if m.architecture == family.name}
        assert (stocks == {None}) == (not family.has_stock) and len(stocks) == 1
    assert len({model.label for model in MODELS.values()}) == len(MODELS)


@pytest.mark.parametrize("name", [n for n, m in MODELS.items() if m.stock not in (None, n)])
def test_every_model_is_stock_with_identity_filters_and_another_with_drawn_ones(name):
    size = models.ModelSize(1, 32, 2, 61, 3, "float32", "cpu")
    stock = MODELS[name].stock
    pair = {each: models.build(size, each, 16) for each in (name, stock)}
    assert type(pair[stock]).__module__.startswith("transformers.models.")
    ids = models.random_ids(size, 2, 16)
    assert models.check_logits(pair, ids, "float32")[name] < 1e-5
    models.randomize_filters(pair[name])
    logits, expected = (pair[each](input_ids=ids).logits for each in (name, stock))
    same = (logits - expected).abs().max() < 1e-5 * expected.abs().max()
    assert same == (name == MODELS[name].plain or MODELS[name].compiled_rotation)


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.stock is None])
def test_models_without_stock_are_built_and_counted(name):
    size = models.ModelSize(2, 32, 2, 61, 3, "float32", "cpu")
    model = models.build(size, name, 200).eval()
    assert size.num_parameters(name, 200) == count_parameters(model)
    assert models.check_logits({name: model}, models.random_ids(size, 1, 9), "float32") == {}
    assert torch.isfinite(model(input_ids=models.random_ids(size, 2, 200)).logits).all()


def test_families_side_by_side(speed, monkeypatch):
    monkeypatch.setattr(train, "_peak_memories", lambda case, names: dict.fromkeys(names, 0))
    names = ("llama-head", "mixer-mamba", "llama", "llama-stock", "pythia", "gla")
    code, record, out, err = speed(
        *("train", *TINY, "--context-length", 16, "--batch-size", 2, "--repeats", 2),
        *("--models", ",".join(names)),
    )
    assert code == 0, err
    rows = record["results"]
    assert tuple(rows) == names and "Mixer, mamba" in out
    # Each is held against its own family: what transformers has of it, and its plain model.
    assert set(record["largest_relative_logit_difference"]) == {"llama-head", "llama", "pythia"}
    assert rows["llama"]["relative_to_plain"] == rows["pythia"]["relative_to_plain"] == 1
    assert rows["mixer-mamba"]["relative_to_plain"] is None
    assert rows["llama-stock"]["relative_to_plain"] > 0
    # And every one against Pythia, round by round.
    assert rows["gla"]["relative_to_plain"] is None
    for row in rows.values():
        rounds = zip(rows["pythia"]["step_seconds"]["all"], row["step_seconds"]["all"], strict=True)
        ratios = [pythia / own for pythia, own in rounds]
        assert row["relative_to_pythia"] == pytest.approx(sum(ratios) / 2)
        assert row["relative_to_pythia_range"] == [min(ratios), max(ratios)]
        assert f"{row['relative_to_pythia']:.3f}" in out
    assert rows["llama-stock"]["parameters"] == rows["llama"]["parameters"]


def test_without_pythia_its_column_is_blank(speed, monkeypatch):
    monkeypatch.setattr(train, "_peak_memories", lambda case, names: dict.fromkeys(names, 0))
    arguments = ("--context-length", 16, "--batch-size", 2, "--repeats", 1, "--models", "gla")
    code, record, out, err = speed("train", *TINY, *arguments)
    assert code == 0, err
    row = record["results"]["gla"]
    assert row["relative_to_pythia"] is row["relative_to_pythia_range"] is None
    _, header, line = out.splitlines()
    assert "of Pythia" in header and line.split()[-2:] == ["unknown", "0"]
    # Name, tokens a second and their range, MFU, peak memory.
    assert len(line.split()) == 5


def test_a_kind_and_a_family_of_ones_own_are_rows(speed, monkeypatch):
    """The kind has a kernel nowhere, so that the reference alone is timed, and checked."""
    monkeypatch.setattr(kinds_table, "_KINDS", dict(kinds_table._KINDS))
    monkeypatch.setattr(architectures, "_ARCHITECTURES", dict(architectures._ARCHITECTURES))
    backwards = kinds_table.Kind(
        "backwards", ("H", "W"), lambda taps, lag, x: -taps[:, lag, None] * x, "minus one"
    )
    kinds_table.register(backwards)
    code, record, _, err = speed(*conv_arguments(conv_type="backwards"))
    assert code == 0, err
    (result,) = record["cases"]
    assert [row["kernel"] for row in result["kernels"]] == ["reference"]
    assert (
        result["kernels"][0]["refused"] is None and "own kinds only" in result["absent"]["conv1d"]
    )
    assert choices.models()["llama-backwards"].label == "Llama, minus one"
    assert "backwards" in choices.own_models()


def test_wrong_model_is_not_timed(speed, monkeypatch):
    build = models.build

    def spoiled(size, name, positions):
        model = build(size, name, positions)
        if name == "cat":
            for name_, parameter in model.named_parameters():
                if name_.endswith("q_filter"):
                    parameter.data = parameter.data.roll(1, dims=-1)
        return model

    monkeypatch.setattr(train, "build", spoiled)
    monkeypatch.setattr(train, "time_in_turn", lambda *_, **__: pytest.fail("timed"))
    code, record, out, err = speed("train", *TINY, "--context-length", 16, "--models", "cat")
    assert (code, record, out) == (2, None, "")
    assert "logits differ" in err.splitlines()[-1] and "'cat'" in err


# Decoding


def test_decode_record(speed):
    arguments = ("--prompts", "5,9", "--new-tokens", 4, "--uncached-tokens", 2, "--repeats", 2)
    code, record, out, err = speed("decode", *TINY, *arguments, "--batch-size", 2)
    assert code == 0, err
    places = [(row["name"], row["case"]["prompt_tokens"]) for row in record["results"]]
    decoded = tuple(MODELS)[: tuple(MODELS).index("stock")]
    assert places == [(name, prompt) for name in decoded for prompt in (5, 9)]
    cold = [row["cold_prompt_tokens"] for row in record["results"]]
    assert cold == list(range(13, 13 + 4 * len(cold), 4))
    for row in record["results"]:
        assert len(row["tokens_per_second_cold"]["all"]) == 1
        cached, uncached = row["tokens_per_second_cached"], row["tokens_per_second_uncached"]
        for measured in (cached, uncached, row["prompt_seconds"]):
            assert len(measured["all"]) == 2
        assert row["cache_speedup"] == pytest.approx(cached["median"] / uncached["median"])
        assert row["near_ties"] == 0
        if row["case"]["prompt_tokens"] == 5:
            shortest, ratio = cached["all"], row["of_shortest_prompt"]
            assert ratio is None
        else:
            ratio = row["of_shortest_prompt"]["all"]
            assert ratio == [own / rival for own in cached["all"] for rival in shortest]
            assert f"{row['of_shortest_prompt']['median']:.2f} (" in out
        assert MODELS[row["name"]].label in out


def test_every_length_of_keys_is_cold_once(monkeypatch):
    """What is decoded as cold has lengths that nothing before it had, in any model."""
    met, cold = set(), []

    def lengths(model, prompt, count):
        new = set(range(prompt.shape[1], prompt.shape[1] + count))
        cold.append(not met & new)
        met.update(new)
        return decode.Decoded(prompt[:, :count], 1.0, 1.0)

    monkeypatch.setattr(decode, "decode_cached", lengths)
    monkeypatch.setattr(decode, "decode_uncached", lambda model, prompt, count: 1.0)
    monkeypatch.setattr(
        decode,
        "check",
        lambda model, prompt, case, name: lengths(model, prompt, case.cached_tokens) and 0,
    )
    size = models.ModelSize(1, 32, 2, 61, 3, "float32", "cpu")
    cases = [decode.DecodeCase(size, 1, prompt, 5, 3) for prompt in (8, 20)]
    decode.decode_speed(cases, ("pythia", "cat"), repeats=1)
    # The check, the cold prompt, a repeat: of two models and two prompts.
    assert cold == [True, True, False] * 2 + [False, True, False] * 2


def test_decoding_is_transformers_greedy():
    size = models.ModelSize(2, 32, 2, 61, 4, "float32", "cpu")
    model = models.build(size, "mh_cat", 32).eval()
    models.randomize_filters(model)
    prompt = models.random_ids(size, 2, 9)
    with torch.no_grad():
        tokens = decode.decode_cached(model, prompt, 6).tokens
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False, use_cache=False)
    assert torch.equal(tokens, expected[:, 9:])


def test_wrong_cache_is_not_timed(speed, monkeypatch):
    from cat_lm.model.cache import StateDynamicLayer

    exchange = StateDynamicLayer.exchange_inputs

    def forgetful(self, *arguments, **options):
        return 20.0 + exchange(self, *arguments, **options)

    monkeypatch.setattr(StateDynamicLayer, "exchange_inputs", forgetful)
    monkeypatch.setattr(decode, "decode_uncached", lambda *_: pytest.fail("timed"))
    arguments = ("--models", "cat", "--prompts", 12, "--new-tokens", 12)
    code, record, out, err = speed("decode", *TINY, *arguments)
    assert (code, record, out) == (2, None, "")
    assert "greedy tokens after a prompt of 12 differ" in err.splitlines()[-1]


@pytest.mark.parametrize("name", ["cat", "cat_ssm", "llama"])
def test_contexts_record(speed, name):
    """One cache serves all, and is as long after the measurement as before."""
    arguments = ("--contexts", "40,77", "--block", 4, "--top-k", 2, "--local", 1, "--repeats", 2)
    code, record, out, err = speed(
        "decode", *TINY, *arguments, "--models", name, "--new-tokens", 9, "--batch-size", 2
    )
    assert code == 0, err
    assert record["cache"] == "random" and "keys and values are random" in out
    assert [row["case"]["context"] for row in record["contexts"]] == [40, 77]
    for row in record["contexts"]:
        keys, landmarks = row["case"]["context"], row["case"]["context"] // 4
        token = 2 * 32 * 4  # rows, channels, bytes
        read = {"dense": 2 * keys * token, "landmark": (landmarks + 2 * 3 * 4) * token}
        assert row["layer_bytes"] == read
        for part in (row["layer"], row["model"]):
            seconds = {name: values["all"] for name, values in part["seconds"].items()}
            assert set(seconds) == {"sdpa", "matmul", "landmark"}
            ratios = [
                dense / own
                for dense, own in zip(seconds[part["dense"]], seconds["landmark"], strict=True)
            ]
            assert part["times_as_fast"]["all"] == pytest.approx(ratios) and len(ratios) == 2


def test_wrong_landmark_attention_is_not_timed(speed, monkeypatch):
    from eval.speed.model import contexts

    attend = contexts._attend
    monkeypatch.setattr(contexts, "_attend", lambda *given: attend(*given) + 0.01)
    monkeypatch.setattr(contexts, "_timed", lambda *_: pytest.fail("timed"))
    arguments = ("--contexts", "40", "--models", "cat", "--block", 4)
    code, record, out, err = speed("decode", *TINY, *arguments)
    assert (code, record, out) == (2, None, "")
    assert "landmark attention after 40 tokens differs by 0.01" in err.splitlines()[-1]


# Stacks of recall's models

STACKS = ("stacks", "--d-model", 16, "--seq-len", 16, "--batch-size", 4, "--repeats", 2)


def test_stacks_record(speed):
    mixers = ("attention", "cat")
    code, record, out, err = speed(*STACKS, "--mixers", ",".join(mixers), "--models", "1,3")
    assert code == 0, err
    assert record["refused"] == [] and record["case"]["sizes"] == [1, 3]
    rows = [(row["mixer"], row["models"]) for row in record["results"]]
    assert rows == [(mixer, models_) for mixer in mixers for models_ in (1, 3)]
    for row in record["results"]:
        seconds = row["step_seconds"]["median"]
        assert len(row["step_seconds"]["all"]) == 2 and row["measured_bytes"] is None
        assert row["model_steps_per_second"] == pytest.approx(row["models"] / seconds)
        first = record["results"][2 * mixers.index(row["mixer"])]
        expected = row["model_steps_per_second"] / first["model_steps_per_second"]
        assert row["times_as_fast_as_the_first"] == pytest.approx(expected)
        assert row["estimated_bytes"] == row["models"] * first["estimated_bytes"] > 0
        assert row["mixer"] in out


def test_a_mixer_that_fails_does_not_stop_the_others(speed, monkeypatch):
    from eval.speed.model import stacks

    train_step = stacks.train_step

    def failing(stack, trials, rows):
        if trials[0].cell.mixer == "attention":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return train_step(stack, trials, rows)

    monkeypatch.setattr(stacks, "train_step", failing)
    code, record, out, err = speed(*STACKS, "--mixers", "attention,cat", "--models", "2")
    assert code == 1 and "1 stacks are wrong and refused" in err
    assert [row["mixer"] for row in record["results"]] == ["cat"]
    (refused,) = record["refused"]
    assert refused["case"] == "attention, 2 as one" and "out of memory" in refused["reason"]
    assert "refused: attention, 2 as one" in out


# Bad input


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("conv", "--windows", "3,0"), "--windows: '0' must be from 1 to 65,536"),
        (("conv", "--shape", "4,1024,8"), "'4,1024,8' must be four numbers"),
        (("conv", "--dtype", "float16"), "'float16' is not one of float32, bfloat16"),
        (("conv", "--kernels", "cpu,cudnn"), "'cudnn' is not one of"),
        (("conv", "--conv-type", "heads"), "'heads' is not one of"),
        (("train", "--models", "gpt2"), "'gpt2' is not one of"),
        (("train", "--heads", "7"), "--hidden-size 512: must be a multiple of --heads 7"),
        (("conv", "--threads", "4096"), "--threads 4096: there are "),
        (("train", "--peak-tflops", "-1"), "--peak-tflops: '-1' must be from 1e-06"),
        (("decode", "--new-tokens", "1"), "--new-tokens: '1' must be from 2"),
        (("conv", "--shape", "65536,65536,64,64"), "--shape 65536,65536,64,64: takes 65,536.0 GiB"),
        (
            ("train", "--hidden-size", "131072"),
            "a model of --hidden-size 131072, --layers 8: takes",
        ),
        (("decode", "--models", "stock"), "'stock' is not one of"),
        (("decode", "--block", "8"), "--block: says nothing without --contexts"),
        (("decode", "--contexts", "8", "--uncached-tokens", "2"), "--uncached-tokens: says"),
        (("decode", "--contexts", "8", "--models", "mamba"), "has no landmark attention"),
        (("decode", "--contexts", str(2**24), "--models", "cat"), "a cache of --contexts"),
        (("decode", "--models", "mixer-hyena"), "'mixer-hyena' is not one of"),
        (("train", "--models", "all,cat"), "'all' is not one of"),
        (("checkpoint", "--model", "llama-stock"), "invalid choice: 'llama-stock'"),
        (
            ("train", "--models", "mixer-gla", "--hidden-size", "36", "--heads", "12"),
            "model mixer-gla: mixer_options: mixer gla:heads=12: heads=12 do not divide 18 keys",
        ),
        (("stacks", "--mixers", "none,rnn"), "'rnn' is not one of"),
        (("stacks", "--task", "sing"), "sing"),
        (("sing",), "invalid choice: 'sing'"),
    ],
)
def test_bad_options(speed, arguments, named):
    code, record, out, err = speed(*arguments)
    assert (code, record, out) == (2, None, "")
    last = err.splitlines()[-1]
    assert "error: " in last and named in last


def test_other_devices(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["eval.speed", "train", "--device", "meta"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert "error: --device meta: " in capsys.readouterr().err


def test_absent_device(monkeypatch, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(sys, "argv", ["eval.speed", "conv", "--device", "cuda"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert "--device cuda: cannot be used" in capsys.readouterr().err
