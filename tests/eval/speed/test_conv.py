"""eval.speed conv: what is timed is right, and what is wrong is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cat_lm.ops import head_conv
from cat_lm.ops.convolution import kinds as kinds_table
from eval.speed import choices, kernels
from eval.speed.choices import KERNELS
from eval.speed.conv import against_rival
from eval.speed.kernels import ConvCase, Kernel
from tests.reference import convolution as reference


def conv_case(**changes) -> ConvCase:
    return replace(ConvCase("head", 2, 12, 3, 4, 5, "float32", "cpu"), **changes)


@pytest.mark.parametrize("conv_type", ["head", "depthwise", "multihead"])
@pytest.mark.parametrize(("time", "window"), [(6, 3), (2, 4), (1, 1)])
def test_expected_results_are_the_definition(conv_type, time, window):
    sizes = {"batch": 2, "time": time, "heads": 2, "head_dim": 3, "window": window}
    work = kernels.work_of(conv_case(conv_type=conv_type, **sizes))
    leaves = [x.double().requires_grad_() for x in work.learned]
    y = reference.convolve(conv_type, *leaves)
    wanted = (y, *torch.autograd.grad(y, leaves, work.upstream[0].double()))
    for found, tensor in zip(work.expected().values(), wanted, strict=True):
        torch.testing.assert_close(found, tensor, rtol=1e-12, atol=1e-12)


def test_expected_step_is_transformers_rotation_after_the_convolution():
    work = kernels.work_of(conv_case(conv_type="qkv", head_dim=16))
    (_, in_parts) = work.find("reference")
    found = kernels.Contender(in_parts, work).results()
    expected = work.expected()
    assert list(found) == list(expected) and list(found)[:4] == ["q", "k", "v", "dqkv"]
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name].double(), tensor, rtol=1e-5, atol=1e-5)


def test_floors_count_each_tensor_once_a_pass():
    work = kernels.work_of(conv_case())
    x, taps = 4 * 2 * 12 * 3 * 4, 4 * 3 * 5
    # Forward; then dy, x and filters in, dx and dfilters out.
    forward = 2 * x + taps
    expected = {"forward": forward, "forward_backward": forward + 3 * x + 2 * taps}
    assert work.floors() == expected
    constants = 4 * (3 * 3 * 5 + 3 * 3 * 4) + 2 * 4 * 12 * 2
    work = kernels.work_of(conv_case(conv_type="qkv"))
    assert work.floors()["forward"] == 2 * 3 * x + constants


def test_choices_are_what_is_there():
    from cat_lm.ops import BACKENDS

    assert tuple(kernels.FINDERS) == KERNELS
    assert set(BACKENDS.names()) <= set(KERNELS)
    assert choices.conv_types() == (*kinds_table.names(), "qkv")


@pytest.mark.parametrize("conv_type", ["depthwise", "multihead", "qkv"])
def test_record_has_every_contender_and_its_rates(conv, conv_type):
    how = {"windows": "1,5", "dtype": "float32,bfloat16", "kernels": "reference,cpu,conv1d,fla"}
    code, record, out, err = conv(conv_type=conv_type, **how)
    assert code == 0, err
    assert (record["benchmark"], record["repeats"], record["refused"]) == ("conv", 2, [])
    assert {"command", "date", "versions", "commit", "machine", "device"} <= set(record)
    cases = [(c["case"]["dtype"], c["case"]["window"]) for c in record["cases"]]
    assert cases == [("float32", 1), ("float32", 5), ("bfloat16", 1), ("bfloat16", 5)]
    expected = {"reference", "cpu", "conv1d, padded", "conv1d, channels last"}
    if conv_type == "qkv":
        ways = ("one call", "parts")
        expected = {f"{name}, in {way}" for name in ("reference", "cpu") for way in ways}
    for result in record["cases"]:
        assert {row["kernel"] for row in result["kernels"]} == expected
        assert all(f"absent: {name}: {why}" in out for name, why in result["absent"].items())
        assert set(result["absent"]) == ({"fla"} if conv_type != "qkv" else set())
        for row in result["kernels"]:
            assert row["kernel"] in out
            for direction, floor in result["floor_bytes"].items():
                timed = row[direction]
                assert len(timed["seconds"]["all"]) == 2
                assert (timed["rival"] is None) == (conv_type == "qkv")
                rate = floor / timed["seconds"]["median"]
                assert timed["bytes_per_second"] == pytest.approx(rate)
                share = rate / result["copy_bytes_per_second"]
                assert timed["of_copy_bandwidth"] == pytest.approx(share)


@pytest.mark.parametrize("conv_type", ["head", "depthwise"])
def test_fla_is_given_what_it_documents(conv, monkeypatch, conv_type):
    """What it says that it equals in torch's terms stands in for it where no GPU is."""

    def causal_conv1d(x, weight=None, bias=None, backend="triton"):
        assert x.is_contiguous() and weight.is_contiguous() and backend == "triton"
        padded = torch.nn.functional.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
        y = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=x.shape[2])
        return y.transpose(1, 2), None

    monkeypatch.setattr(kernels, "_import_fla", lambda case: causal_conv1d)
    code, record, out, _ = conv(kernels="fla", conv_type=conv_type, dtype="bfloat16")
    assert code == 0, out
    assert [row["kernel"] for row in record["cases"][0]["kernels"]] == ["fla"]


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
def test_wrong_kernel_is_refused(conv, monkeypatch, spoil, named, dtype):
    def convolve(x, filters):
        return spoil(head_conv(x, filters, backend="reference"))

    wrong = Kernel("wrong", "a kernel that is wrong on purpose", convolve)
    monkeypatch.setitem(kernels.FINDERS, "cpu", lambda case: [wrong])
    code, record, out, err = conv(kernels="cpu,conv1d", dtype=dtype, shape="2,300,3,8")
    assert code == 1
    (refused,) = record["refused"]
    assert refused["kernel"] == "wrong" and refused["reason"].startswith(named)
    rows = {row["kernel"]: row for row in record["cases"][0]["kernels"]}
    assert "forward" not in rows["wrong"]
    right = rows["conv1d, padded"]
    assert right["refused"] is None and right["forward"]["seconds"]["median"] > 0
    assert "refused: wrong: " in out
    assert err.endswith("error: 1 kernels are wrong and refused\n")


def test_unrotated_step_is_refused(conv, monkeypatch):
    in_one_call = kernels.ops.head_conv_qkv

    def unrotated(qkv, filters, bias, rotary, backend):
        is_timed = qkv.dtype == torch.float32  # and not what is expected, in fp64
        return in_one_call(qkv, filters, bias, rotary=None if is_timed else rotary, backend=backend)

    monkeypatch.setattr(kernels.ops, "head_conv_qkv", unrotated)
    code, record, _, _ = conv(conv_type="qkv", kernels="reference")
    assert code == 1
    (refused,) = record["refused"]
    assert refused["kernel"] == "reference, in one call"
    assert refused["reason"].startswith("q is off") and "; v is off" not in refused["reason"]


def test_rival_is_the_fastest_layout():
    seconds = {"cpu": [1.0, 1.0, 2.0], "conv1d": [9.0, 9.0, 9.0], "conv1d, padded": [3.0, 4.0, 2.0]}
    found = against_rival(seconds)
    assert {row["rival"] for row in found.values()} == {"conv1d, padded"}
    assert found["cpu"]["times_as_fast_as_conv1d"] == 3.0
    assert found["cpu"]["times_as_fast_range"] == [1.0, 4.0]
    assert against_rival({"cpu": [1.0]})["cpu"]["rival"] is None
