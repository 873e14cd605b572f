"""Long filters: the definition by loops, and the three forms of the one function."""

from __future__ import annotations

import pytest
import torch

from cat_lm.ops.long_filter import api, chunks, filters
from cat_lm.ops.long_filter.api import FORMS, choose_backend, continued, long_conv, state_after
from cat_lm.ops.recurrence.decaying_scan import decaying_scan
from cat_lm.ops.runtime.triton_launch import INSTALLED
from tests.unit.long_filters import KINDS, by_loops, random_numbers, taps_by_definition


def modes_of(kind, numbers):
    return filters.get(kind).modes_of(numbers, KINDS[kind])


def inputs(kind, time, heads=2, width=3):
    torch.manual_seed(time)
    return random_numbers(kind, heads, KINDS[kind]), torch.randn(2, time, heads, width).double()


@pytest.mark.parametrize("kind", KINDS)
def test_taps_are_those_of_the_definition(kind):
    numbers, _ = inputs(kind, 9)
    expected = taps_by_definition(kind, numbers, 9)
    torch.testing.assert_close(
        chunks.taps_of(modes_of(kind, numbers), 9), expected, rtol=0, atol=1e-12
    )
    assert (expected[:, 8].abs() > 1e-3).all()  # the far taps are of a size


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("time", [1, 4, 11])
@pytest.mark.parametrize("kind", KINDS)
def test_three_forms_are_one_function_with_its_gradients(kind, time, packed):
    """Of T = 1, a whole chunk, and chunks with a rest; documents end within chunks and at them."""
    numbers, x = inputs(kind, time)
    ids = (torch.arange(11)[:time] >= torch.tensor([[3], [8]])).long() if packed else None
    if packed and time == 11:
        ids[0] += (torch.arange(11) >= 4).long()  # a document of one token
    bias, weight = torch.randn(2, 3).double(), torch.randn(x.shape).double()
    expected = by_loops(x, taps_by_definition(kind, numbers, time), ids) + bias
    gradients = {}
    for form in FORMS:
        given = [t.clone().requires_grad_() for t in (x, numbers, bias)]
        modes = modes_of(kind, given[1])
        y = long_conv(given[0], modes, given[2], document_ids=ids, form=form, length=4)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-10)
        gradients[form] = torch.autograd.grad((y * weight).sum(), given, allow_unused=False)
    for form in FORMS[:2]:
        for found, other in zip(gradients[form], gradients["materialised"], strict=True):
            torch.testing.assert_close(found, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_decaying_scan_of_turned_inputs(kind):
    """An oracle of its own: Re(c e^{iφ(t−s)}) as products of what turns with t and with s."""
    numbers, x = inputs(kind, 13)
    modes = modes_of(kind, numbers)
    steps = torch.arange(13.0, dtype=torch.float64)[:, None, None]
    angle = torch.zeros_like(modes.rate) if modes.angle is None else modes.angle
    imaginary = torch.zeros_like(modes.rate) if modes.angle is None else modes.imaginary
    cosine, sine = (steps * angle).cos(), (steps * angle).sin()
    q = torch.cat(
        [modes.real * cosine - imaginary * sine, modes.real * sine + imaginary * cosine], -1
    )
    q, k = (s.expand(2, -1, -1, -1) for s in (q, torch.cat([cosine, sine], -1)))
    a = -torch.cat([modes.rate, modes.rate], -1)[..., None]
    o = decaying_scan(q, k, x, torch.ones(2, 13, 2, 1, 1).double(), a)
    expected = o + modes.now[:, None] * x
    torch.testing.assert_close(long_conv(x, modes, length=4), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("cut", [1, 4, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_the_state_is_all_of_the_past(kind, cut):
    numbers, x = inputs(kind, 11)
    modes = modes_of(kind, numbers)
    whole, last = long_conv(x, modes, return_state=True, length=4)
    first, state = long_conv(x[:, :cut], modes, return_state=True, length=4)
    assert state.shape == (2, 2, KINDS[kind], 3)
    for form in FORMS[:2]:
        rest, end = long_conv(
            x[:, cut:], modes, initial_state=state, return_state=True, form=form, length=4
        )
        torch.testing.assert_close(torch.cat([first, rest], 1), whole, rtol=0, atol=1e-10)
        torch.testing.assert_close(end, last, rtol=0, atol=1e-10)
    # After rows of other lengths, with and without a state before them.
    lengths = torch.tensor([cut, 3])
    for before in (None, state):
        found = state_after(x, modes, lengths, before)
        for row, length in enumerate(lengths):
            own = None if before is None else before[row : row + 1]
            _, expected = long_conv(
                x[row : row + 1, :length], modes, initial_state=own, return_state=True
            )
            torch.testing.assert_close(found[row : row + 1], expected, rtol=0, atol=1e-10)


def test_gradients_reach_the_state_before_and_come_from_the_state_after():
    numbers, x = inputs("ssm", 7)
    modes = modes_of("ssm", numbers)
    state = torch.randn(2, 2, 6, 3).double()

    def ends(x, state):
        return long_conv(x, modes, initial_state=state, return_state=True, length=3)

    given = [t.requires_grad_() for t in (x, state)]
    assert torch.autograd.gradcheck(ends, given)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_the_future_changes_no_bit_of_the_past(form, dtype):
    torch.manual_seed(0)
    modes = modes_of("ssm", random_numbers("ssm", 2, 6, torch.float32))
    x = torch.randn(1, 150, 2, 4).to(dtype)
    changed = x.clone()
    changed[:, 90] *= 1e3
    changed[:, 120:] = 7e4
    before, after = (long_conv(s, modes, form=form) for s in (x, changed))
    assert torch.equal(before[:, :90], after[:, :90]) and not before.equal(after)
    spectra = [torch.fft.rfft(s.float(), 512, dim=1) for s in (x, changed)]
    taps = torch.fft.rfft(chunks.taps_of(modes, 150).T, 512, dim=0)[..., None]
    by_fft = [torch.fft.irfft(s * taps, 512, dim=1)[:, :90] for s in spectra]
    assert not torch.equal(*by_fft)  # what the test is for: a transform's rounding is not causal


def test_half_precision_has_states_and_sums_in_fp32():
    """Of the filter that rounded numbers are; the next test says how far that one is off."""
    numbers, x = inputs("ssm", 200)
    modes = modes_of("ssm", numbers.float().bfloat16())
    assert modes.rate.dtype == torch.float32
    y, state = long_conv(x.bfloat16(), modes, return_state=True)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    exact = long_conv(x.bfloat16().double(), filters.Modes(*(m.double() for m in modes)))
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(long_conv(x.float(), modes), long_conv(x.float(), modes))
        inside = long_conv(x.float(), modes)
        real = torch.arange(200)[None] < torch.tensor([[150], [200]])
        padded = continued(x.float(), modes, None, None, real)[1]
    torch.testing.assert_close(inside, long_conv(x.float(), modes), rtol=0, atol=0)
    assert padded.dtype == torch.float32
    assert torch.equal(padded, continued(x.float(), modes, None, None, real)[1])


@pytest.mark.parametrize("kind", filters.names())
@pytest.mark.parametrize("place", [-200.0, -60.0, 60.0, 104.0, 200.0])
def test_numbers_far_from_any_start_are_filters_with_gradients(kind, place):
    numbers = filters.get(kind).start_as("uniform", 2, 4).float()
    numbers[:, :2] = place  # of an SSM the decays, else θ
    for step in (numbers[0, filters.get(kind).fixed(4) - 1].item(), place):
        moved = numbers.clone()
        moved[:, filters.get(kind).fixed(4) - 1] = step
        moved.requires_grad_()
        y = long_conv(torch.ones(1, 40, 2, 3), filters.get(kind).modes_of(moved, 4))
        (gradient,) = torch.autograd.grad(y.square().sum(), moved)
        assert y.isfinite().all() and gradient.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "usual", "most"), [("ssm", 0.1, 0.4), ("exponential", 0.005, 0.05)]
)
def test_rounded_numbers_are_other_filters(kind, usual, most):
    """By as much as cat_lm/README.md says; autocast, which rounds no numbers, changes nothing."""
    torch.manual_seed(0)
    known = filters.get(kind)
    numbers = known.start_as("uniform", 64, 16)
    whole, rounded = (
        chunks.taps_of(known.modes_of(given, 16), 2048)[:, 1:]
        for given in (numbers, numbers.bfloat16())
    )
    off = (rounded - whole).norm(dim=1) / whole.norm(dim=1)
    assert usual / 1.5 < off.median() < usual * 1.5 and off.max() < most
    with torch.autocast("cpu", torch.bfloat16):
        again = chunks.taps_of(known.modes_of(numbers, 16), 2048)[:, 1:]
    assert torch.equal(again, whole)


def test_what_is_not_finite_reaches_no_earlier_chunk_and_no_other_row():
    """As far as `long_conv` says, and no farther."""
    numbers, x = inputs("ssm", 12)
    modes = modes_of("ssm", numbers)
    documents = torch.tensor([[0] * 6 + [1] * 6] * 2)
    whole = long_conv(x, modes, document_ids=documents, length=4)
    x[0, 5] = torch.inf
    y = long_conv(x, modes, document_ids=documents, length=4)
    assert torch.equal(y[0, :4], whole[0, :4]) and torch.equal(y[1], whole[1])
    assert not y[0, 4:].isfinite().any()


@pytest.mark.parametrize("kind", KINDS)
def test_the_identity_changes_no_bit(kind):
    for state in (2, 16):
        numbers = filters.get(kind).identity(3, state)
        assert numbers.shape == (3, filters.get(kind).numbers(state))
        x = torch.randn(1, 70, 3, 4)
        assert torch.equal(long_conv(x, filters.get(kind).modes_of(numbers, state)), x)


def test_a_start_has_rates_between_a_thousandth_and_a_tenth():
    for kind, state in {"exponential": 4, "ssm": 8}.items():
        rate = filters.get(kind).modes_of(filters.get(kind).identity(8, state), state).rate
        step = rate * (2 if kind == "ssm" else 1)  # S4D's real part is a half
        assert 1e-3 < step.min() < 1.7e-3 and 0.06 < step.max() < 0.1
        assert step[:, 0].unique().numel() == 8


def test_models_at_once_are_models_in_turn():
    torch.manual_seed(0)
    numbers = torch.stack([random_numbers("ssm", 2, 6) for _ in range(3)])
    xs = torch.randn(3, 2, 9, 2, 3).double()

    def outputs(numbers, x):
        return long_conv(x, modes_of("ssm", numbers), length=4)

    for axes in ((0, 0), (0, None)):
        given = [numbers.requires_grad_(), (xs if axes[1] == 0 else xs[0].clone()).requires_grad_()]
        found = torch.func.vmap(outputs, axes)(*given)
        expected = torch.stack(
            [outputs(numbers[i], given[1][i] if axes[1] == 0 else given[1]) for i in range(3)]
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        gradients = (torch.autograd.grad(y.sin().sum(), given) for y in (found, expected))
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_compilers_know_what_the_operator_gives():
    numbers, x = inputs("ssm", 11)
    chunk = [t.detach().requires_grad_() for t in chunks.chunk_of(modes_of("ssm", numbers), 4)]
    initial = torch.zeros(2, 2, 6, 3).double()
    for positions in (None, (torch.arange(11) % 5).int().expand(2, -1).contiguous()):
        given = (x.requires_grad_(), *chunk, positions, initial, "reference")
        torch.library.opcheck(api._forward, given)


def test_what_does_not_fit_is_refused():
    numbers, x = inputs("ssm", 5)
    modes = modes_of("ssm", numbers)
    ids = torch.zeros(2, 5, dtype=torch.long)
    refused = {
        "documents cannot be used together with a state": {"document_ids": ids, "return_state": 1},
        "form='fft': choose one of": {"form": "fft"},
        "has no state": {"form": "materialised", "return_state": True},
        r"initial_state must be \[2, 2, 6, 3\]": {"initial_state": torch.zeros(2, 2, 5, 3)},
        "backend='cpu' cannot serve long filters": {"backend": "cpu"},
        "backend='triton' cannot serve long filters": {"backend": "triton"},
        "backend='fast': choose": {"backend": "fast"},
    }
    for message, how in refused.items():
        with pytest.raises(ValueError, match=message):
            long_conv(x, modes, **how)
    with pytest.raises(ValueError, match="filters are 2 heads'"):
        long_conv(x[:, :, :1], modes)
    with pytest.raises(ValueError, match=r"must be \[B, T, H, D\] and not empty"):
        long_conv(x[:, :0], modes)
    with pytest.raises(
        ValueError, match='conv_filter="fir": must be one of taps, exponential, ssm'
    ):
        filters.get("fir")
    assert choose_backend("cpu", torch.float32, 6).name == "reference"


@pytest.mark.skipif(not INSTALLED, reason="triton is not installed")
def test_serves_a_gpu_alone():
    assert choose_backend("cuda", torch.bfloat16, 16).name == "triton"
    reasons = {"it has no fp64": torch.float64, "conv_state=128 is above its 64": torch.float32}
    for reason, dtype in reasons.items():
        name, said = choose_backend("cuda", dtype, 128)
        assert name == "reference" and reason in said
    with pytest.raises(ValueError, match="it computes cuda tensors, not cpu tensors"):
        choose_backend("cpu", torch.float32, 16, "triton")
