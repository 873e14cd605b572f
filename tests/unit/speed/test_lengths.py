"""`python -m eval.speed lengths`: what it times, and that a wrong filter is refused."""

from __future__ import annotations

import json

import pytest
import torch

from cat_lm.training.preflight import facts
from eval.speed.conv import check, lengths
from eval.speed.conv.lengths import ATTENTION, LengthOptions, length_speed

TINY = {"batch": 2, "heads": 2, "head_dim": 8, "window": 3, "state": 4, "repeats": 2}
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_contender_is_timed_at_every_length(dtype):
    """Shorter than a chunk, shorter than W, one token, and no whole number of chunks."""
    times = (1, 2, 31, 100)
    record = length_speed(LengthOptions(times, dtype=dtype, **TINY), CPU)
    assert record["refused"] == []
    names = list(dict.fromkeys(row["contender"] for row in record["rows"]))
    assert names[0] == "head filters, W=3" and names[-1] == ATTENTION
    assert {name.split(",")[0] for name in names[1:-1]} == set(record["backends"])
    assert [row["time"] for row in record["rows"]] == [t for t in times for _ in names]
    for row in record["rows"]:
        for way in lengths.DIRECTIONS:
            assert len(row[way]["seconds"]["all"]) == 2
            own = row[way]["times_as_fast_as_attention"]["all"]
            assert row["contender"] != ATTENTION or own == [1.0, 1.0]
    assert len(lengths.length_lines(record)) == 2


def test_what_computes_something_else_is_refused(monkeypatch):
    """A token late, as a chunk's border may be: right for all tokens but a few."""
    right = lengths.long_conv

    def late(x, modes):
        y = right(x, modes)
        return torch.cat([y[:, :50], y[:, 49:-1]], dim=1)

    monkeypatch.setattr(lengths, "long_conv", late)
    record = length_speed(LengthOptions((50, 100), dtype="float32", **TINY), CPU)
    assert {one["time"] for one in record["refused"]} == {100}
    assert all("chunks" in one["contender"] for one in record["refused"])
    assert len(record["refused"]) == len(record["backends"])
    assert not any(row["time"] == 100 and "chunks" in row["contender"] for row in record["rows"])
    assert any("refused: " in line for line in lengths.length_lines(record))


class _OtherBackward(torch.autograd.Function):
    """Nothing forward; backward the gradient `factor` times."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return ctx.factor * dy, None


def _with_gradients_times(right, number, factor):
    """`right`, where the gradient of input `number`, x or one of the modes, is `factor` times."""

    def changed(x, modes):
        inputs = [x, *modes]
        inputs[number] = _OtherBackward.apply(inputs[number], factor)
        return right(inputs[0], type(modes)(*inputs[1:]))

    return changed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("number", "factor", "name"), [(0, 2.0, "dx"), (1, 0.0, "dnow"), (2, 1.05, "drate")]
)
def test_a_wrong_gradient_is_refused(monkeypatch, dtype, number, factor, name):
    """Right forward, and all other gradients right: twice, none at all, and a twentieth more."""
    wrong = _with_gradients_times(lengths.long_conv, number, factor)
    monkeypatch.setattr(lengths, "long_conv", wrong)
    record = length_speed(LengthOptions((50,), dtype=dtype, **TINY), CPU)
    assert len(record["refused"]) == len(record["backends"])
    for one in record["refused"]:
        assert "chunks" in one["contender"] and one["reason"].startswith(f"{name} is off by ")
        assert one["reason"].count(" is off by ") == 1
    assert not any("chunks" in row["contender"] for row in record["rows"])


@pytest.mark.parametrize("time", [1, 2, 7, 40])
def test_expectations_are_the_definition_lag_by_lag(time):
    """By a Fourier transform as by `check`'s sums over lags; W = 21 is more than most texts."""
    options = LengthOptions((time,), dtype="float32", **{**TINY, "window": 21})
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn((2, time, 2, 8), generator=generator) for _ in range(2))
    for one in lengths._contenders(options, x, generator):
        if one.taps is None:
            continue
        learned = [part.double().requires_grad_() for part in one.inputs[1:]]
        taps = one.taps(*learned)
        right = check.expected_results("head", x, taps, dy)
        gradients = torch.autograd.grad(taps, learned, right["dfilters"])
        right = [right["y"], right["dx"], *gradients]
        found = lengths._expected(one, dy)
        assert list(found) == ["y", *one.names]
        torch.testing.assert_close(list(found.values()), right, rtol=1e-10, atol=1e-11)


def test_taps_of_lags_that_no_token_has_are_no_reason_to_refuse():
    options = LengthOptions((2,), dtype="float32", **{**TINY, "window": 21})
    x, dy = torch.randn(2, 2, 2, 2, 8)
    head = lengths._contenders(options, x, torch.Generator())[0]
    assert lengths._verdict(head, dy, "float32") is None


def test_ratios_to_head_filters_that_are_refused_are_left_out(monkeypatch):
    """The next contender does not take their place."""
    right = lengths.head_conv
    monkeypatch.setattr(lengths, "head_conv", lambda x, taps: 2 * right(x, taps))
    record = length_speed(LengthOptions((20,), dtype="float32", **TINY), CPU)
    assert [one["contender"] for one in record["refused"]] == ["head filters, W=3"]
    assert len(record["rows"]) == 2 * len(record["backends"]) + 1
    for row in record["rows"]:
        for way in lengths.DIRECTIONS:
            assert row[way]["times_as_fast_as_head"] is None
            assert row[way]["times_as_fast_as_attention"]["median"] > 0
    table = lengths.length_lines(json.loads(json.dumps(record)))[1].splitlines()[1:]
    assert len(table) == len(record["rows"])
    assert all(line.split().count("-") == 2 for line in table)


def test_ratios_without_attention_are_left_out(monkeypatch):
    every = lengths._contenders
    monkeypatch.setattr(lengths, "_contenders", lambda *given: every(*given)[:-1])
    record = length_speed(LengthOptions((20,), dtype="float32", **TINY), CPU)
    assert all(row["forward"]["times_as_fast_as_attention"] is None for row in record["rows"])
    assert record["rows"][0]["forward"]["times_as_fast_as_head"]["all"] == [1.0, 1.0]


def test_the_fourier_transform_is_timed_from_the_same_learned_numbers_as_chunks(monkeypatch):
    """Its taps are computed in every call, and gradients reach what they are computed from."""
    calls, right = [], lengths.taps_of
    monkeypatch.setattr(lengths, "taps_of", lambda *given: calls.append(1) or right(*given))
    options = LengthOptions((20,), dtype="float32", **TINY)
    x = torch.randn(2, 20, 2, 8)
    found = {one.name: one for one in lengths._contenders(options, x, torch.Generator())}
    assert not calls
    for name in lengths.filters.names():
        chunked, fourier = (found[f"{name}, N=4, {way}"] for way in ("chunks", "Fourier"))
        assert chunked.inputs is fourier.inputs and chunked.names == fourier.names
        before = len(calls)
        fourier.forward()
        gradients = fourier.forward_backward(lengths._leaves(fourier.inputs), x)
        assert len(calls) == before + 2
        assert [one.shape for one in gradients] == [one.shape for one in fourier.inputs]


def test_where_zeros_are_expected_only_zeros_are_right():
    """As of a decay's gradient in a text of one token."""
    zeros, one = torch.zeros(3, dtype=torch.float64), torch.tensor([0.0, 1e-30, 0.0])
    assert check.distances(zeros.float(), zeros) == {"norm": 0.0, "largest": 0.0}
    for wrong in (one, one * float("nan")):
        assert check.distances(wrong, zeros) == {"norm": float("inf"), "largest": float("inf")}


def test_the_command(speed):
    words = ("--lengths", 40, "--heads", 2, "--head-dim", 8, "--state", 4, "--repeats", 1)
    code, record, out, err = speed("lengths", *words)
    assert code == 0, err
    assert record["benchmark"] == "lengths" and record["rows"]
    assert ATTENTION in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--state", "5"), "--state 5: must be even"),
        (("--lengths", "40,16777216"), "--lengths 16777216: takes 1.0 GiB, but 0.5 GiB of memory"),
        (("--lengths", "1073741824"), "'1073741824' must be from 1 to 16,777,216"),
    ],
)
def test_what_cannot_be_timed_is_refused_in_one_line(words, message, speed, monkeypatch):
    monkeypatch.setattr(facts, "free_memory", lambda device: 2**29)
    code, record, _, err = speed("lengths", "--heads", 2, "--head-dim", 8, *words)
    assert (code, record) == (2, None) and message in err and err.count("\n") == 1
