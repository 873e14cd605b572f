"""Contracts of long filters, for each filter of the registry, chunks and each backend."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from cat_lm.model import CatConfig, CatForCausalLM
from cat_lm.ops.long_filter import LENGTH
from tests.contracts.operators import (
    INSTALLED,
    assert_close,
    exact,
    long_conv,
    long_filter_api,
    long_filters,
    serving,
    with_gradients,
)
from tests.reference.convolution import convolve
from tests.reference.long_filter import long_taps

STATES = {name: 6 for name in long_filters.names()}
BACKENDS = serving(
    lambda name: long_filter_api.choose_backend("cpu", torch.float32, 6, name),
    ["reference", "triton"],
)
# The chunked form by each backend, and the recurrence, in chunks of one token.
FORMS = [("chunked", name) for name in BACKENDS] + [("recurrent", "reference")]
each_filter = pytest.mark.parametrize("name", STATES)
each_form = pytest.mark.parametrize(("form", "backend"), FORMS)


def draw(name: str, heads: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return numbers of filters that turn and fade within some 20 tokens."""
    state = STATES[name]
    numbers = long_filters.get(name).identity(heads, state)
    own = torch.randn(numbers.shape)
    numbers[:, -state - 1 :] = own[:, -state - 1 :]
    if name == "exponential":
        numbers[:, :state] = 1.5 + own[:, :state]
    else:
        numbers[:, : -state - 1] += 0.3 * own[:, : -state - 1]
        numbers[:, state] = math.log(0.2)
    return numbers.to(dtype).requires_grad_()


def modes(name: str, numbers: Tensor):
    return long_filters.get(name).modes_of(numbers, STATES[name])


def inputs(name: str, time: int, dtype: torch.dtype, width: int = 3) -> list[Tensor]:
    """Return leaves: x [2, T, 2, D], numbers of filters and a bias."""
    torch.manual_seed(time)
    x, bias = torch.randn(2, time, 2, width), torch.randn(2, width)
    leaves = [x.to(dtype), draw(name, 2), bias.to(dtype)]
    return [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]


def defined(name: str, leaves: list[Tensor], ids: Tensor | None = None) -> Tensor:
    x, numbers, bias = leaves
    return convolve("head", x, long_taps(name, numbers, STATES[name], x.shape[1]), bias, ids)


def ids_of(time: int) -> Tensor:
    """Return documents of one token, that end with a chunk of four, and that go on beyond it."""
    ids = (torch.arange(time) >= torch.tensor([[3], [8]])).long()
    ids[0] += (torch.arange(time) >= 4).long()
    return ids


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("time", [1, 4, 11, 21])
@each_form
@each_filter
def test_form_equals_reference_with_gradients(name, form, backend, time, packed):
    single = backend == "triton"
    leaves = inputs(name, time, torch.float32 if single else torch.float64, 20 if single else 3)
    ids = ids_of(time) if packed else None
    y = long_conv(
        leaves[0].mT.contiguous().mT, modes(name, leaves[1]), leaves[2], document_ids=ids,
        length=1 if form == "recurrent" else 4 if time < 21 else 16, backend=backend,
    )  # fmt: skip
    same = exact(leaves)
    wanted = with_gradients([defined(name, same, ids)], same)
    assert_close(with_gradients([y], leaves), wanted, 2e-5 if single else 1e-9)


@pytest.mark.parametrize("cuts", [[1, 10], [4, 3, 4], [6, 5]], ids=str)
@each_form
@each_filter
def test_chunks_with_state_equal_whole_forwards_and_backwards(name, form, backend, cuts):
    dtype = torch.float32 if backend == "triton" else torch.float64
    leaves, state, outputs = inputs(name, 11, dtype), None, []
    for part in leaves[0].split(cuts, dim=1):
        y, state = long_conv(
            part, modes(name, leaves[1]), leaves[2], initial_state=state, return_state=True,
            length=1 if form == "recurrent" else 4, backend=backend,
        )  # fmt: skip
        outputs.append(y)
    assert state.shape == (2, 2, STATES[name], 3)
    same = exact(leaves)
    wanted = with_gradients([defined(name, same)], same)
    found = with_gradients([torch.cat(outputs, 1)], leaves)
    assert_close(found, wanted, 2e-5 if backend == "triton" else 1e-9)
    # The state is read by the tokens that follow: gradients of it are those of the whole.
    _, last = long_conv(leaves[0], modes(name, leaves[1]), return_state=True, backend=backend)
    assert_close([state], [last], 1e-5)


@each_filter
def test_gradients_pass_through_states(name):
    leaves = inputs(name, 7, torch.float64)
    state = torch.randn(2, 2, STATES[name], 3).double().requires_grad_()

    def ends(x: Tensor, numbers: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        found = modes(name, numbers)
        return long_conv(x, found, initial_state=state, return_state=True, length=3)

    assert torch.autograd.gradcheck(ends, [*leaves[:2], state], fast_mode=True)


@pytest.mark.parametrize("before", [False, True])
@each_filter
def test_state_of_rows_that_end_in_padding(name, before):
    leaves, lengths = inputs(name, 11, torch.float64), torch.tensor([5, 11])
    found, filters = None, modes(name, leaves[1])
    if before:
        found = torch.randn(2, 2, STATES[name], 3).double()
    real = torch.arange(11) < lengths[:, None]
    x = leaves[0] * real[..., None, None]
    y, last = long_filter_api.continued(x, filters, leaves[2], found, real)
    # What stands after a row's end is not read, whatever it is.
    after = long_filter_api.state_after(leaves[0].detach(), filters, lengths, found)
    assert_close([after], [last], 1e-9)
    for row, length in enumerate(lengths):
        own = slice(row, row + 1)
        how = {"initial_state": found[own] if before else None, "return_state": True}
        wanted = long_conv(x[own, :length], filters, leaves[2], **how)
        assert_close([y[own, :length], last[own]], wanted, 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_form
def test_future_and_other_row_change_no_bit(form, backend, dtype):
    """A transform over the whole row would round earlier positions differently."""
    torch.manual_seed(0)
    filters, x = modes("ssm", draw("ssm", 2, torch.float32)), torch.randn(2, 70, 2, 4).to(dtype)
    changed = x.clone()
    changed[0, 45] *= 1e3
    changed[0, 60:] = 7e4
    how = {"length": 1 if form == "recurrent" else LENGTH, "backend": backend}
    before, after = (long_conv(s, filters, **how) for s in (x, changed))
    assert torch.equal(before[0, :45], after[0, :45]) and torch.equal(before[1], after[1])
    assert not torch.equal(before, after)
    assert torch.equal(before, long_conv(x, filters, **how))


@each_form
@each_filter
def test_half_precision_has_states_and_sums_in_fp32(name, form, backend):
    x, numbers, _ = inputs(name, 40, torch.bfloat16)
    filters = modes(name, numbers)
    assert filters.rate.dtype == torch.float32
    how = {"length": 1 if form == "recurrent" else LENGTH, "backend": backend}
    y = long_conv(x, filters, **how)
    same = exact([x, numbers])
    wanted = defined(name, [*same, torch.zeros(2, 3).double()])
    assert y.dtype == torch.bfloat16
    assert_close([y], [wanted], 8e-3)
    assert long_conv(x, filters, return_state=True, **how)[1].dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        inside = long_conv(x.float(), filters, **how)
    assert torch.equal(inside, long_conv(x.float(), filters, **how))


@each_filter
def test_filter_describes_its_numbers(name):
    row = long_filters.get(name)
    for state in (2, 16):
        numbers = row.identity(3, state)
        assert numbers.shape == (3, row.numbers(state)) and row.numbers(state) > row.fixed(state)
        x = torch.randn(1, 40, 3, 4)
        assert torch.equal(long_conv(x, row.modes_of(numbers, state)), x)
        rate = row.modes_of(numbers, state).rate
        assert rate.min() >= 5e-4 and rate.max() <= 0.1 and rate[:, 0].unique().numel() == 3
        for init in ("identity", "uniform", "residual"):
            start = row.start_as(init, 3, state)
            drawn = start[:, -state - 1 :] - (0 if init == "uniform" else numbers[:, -state - 1 :])
            assert torch.equal(start[:, : -state - 1], numbers[:, : -state - 1])
            assert bool(drawn.any()) == (init != "identity") and drawn.abs().max() <= state**-0.5
        # F_j = e^{−j/b}, of sum 1 over b lags.
        taps = long_taps(name, row.average(3, state, 5).double(), state, 12)
        faded = torch.exp(-torch.arange(12.0).double() / 5)
        assert_close([taps], [(faded / faded[:5].sum()).expand(3, -1)], 1e-5)
    assert row.meaning
    assert row.problem(4) == "" and (name != "ssm" or row.problem(3))


@pytest.mark.parametrize("place", [-200.0, -60.0, 60.0, 104.0, 200.0])
@each_filter
def test_numbers_far_from_any_start_have_finite_gradients(name, place):
    numbers = draw(name, 2, torch.float32).detach()
    for column in (0, long_filters.get(name).fixed(STATES[name]) - 1):
        moved = numbers.clone()
        moved[:, column] = place
        moved.requires_grad_()
        y = long_conv(torch.ones(1, 40, 2, 3), modes(name, moved))
        (gradient,) = torch.autograd.grad(y.square().sum(), moved)
        assert y.isfinite().all() and gradient.isfinite().all()


def test_what_is_not_finite_reaches_no_earlier_chunk_and_no_other_row():
    """Values that are not finite spread only as far as `long_conv` documents."""
    x, numbers, _ = (s.detach() for s in inputs("ssm", 12, torch.float64))
    filters, ids = modes("ssm", numbers), torch.tensor([[0] * 6 + [1] * 6] * 2)
    whole = long_conv(x, filters, document_ids=ids, length=4)
    x[0, 5] = torch.inf
    y = long_conv(x, filters, document_ids=ids, length=4)
    assert torch.equal(y[0, :4], whole[0, :4]) and torch.equal(y[1], whole[1])
    assert not y[0, 4:].isfinite().any()


@pytest.mark.parametrize(
    ("name", "usual", "most"), [("ssm", 0.1, 0.4), ("exponential", 5e-3, 0.05)]
)
def test_rounded_numbers_are_other_filters(name, usual, most):
    """By as much as cat_lm/README.md says."""
    torch.manual_seed(0)
    numbers = long_filters.get(name).start_as("uniform", 16, 16)
    impulse = torch.zeros(1, 500, 16, 1)
    impulse[:, 0] = 1
    whole, rounded = (
        long_conv(impulse, long_filters.get(name).modes_of(s, 16))[0, 1:, :, 0].T
        for s in (numbers, numbers.bfloat16())
    )
    off = (rounded - whole).norm(dim=1) / whole.norm(dim=1)
    assert usual / 1.7 < off.median() < usual * 1.7 and off.max() < most


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("stacked", [(0, 1), (1,)], ids=str)
def test_vmap_equals_loop_forwards_and_backwards(stacked, packed):
    leaves, ids = inputs("ssm", 9, torch.float64)[:2], ids_of(9) if packed else None
    for i in stacked:
        leaves[i] = torch.stack([s * leaves[i].detach() for s in (1, 0.5)]).requires_grad_()

    def outputs(x: Tensor, numbers: Tensor) -> Tensor:
        return long_conv(x, modes("ssm", numbers), document_ids=ids, length=4)

    axes = tuple(0 if i in stacked else None for i in range(2))
    found = torch.func.vmap(outputs, axes)(*leaves)
    x, numbers = leaves
    alone = [outputs(x[i] if 0 in stacked else x, numbers[i]) for i in (0, 1)]
    assert_close(
        with_gradients([found], leaves), with_gradients([torch.stack(alone)], leaves), 1e-9
    )


def test_refuses_what_does_not_fit_and_names_what_serves():
    x, numbers, _ = inputs("ssm", 5, torch.float64)
    filters, ids = modes("ssm", numbers), torch.zeros(2, 5, dtype=torch.long)
    for message, how in {
        "documents cannot be used together with a state": {"document_ids": ids, "return_state": 1},
        r"initial_state must be \[2, 2, 6, 3\]": {"initial_state": torch.zeros(2, 2, 5, 3)},
        "backend='cpu' cannot serve long filters": {"backend": "cpu"},
        "backend='triton' cannot serve long filters": {"backend": "triton"},
        "backend='fast': must be one of": {"backend": "fast"},
    }.items():
        with pytest.raises(ValueError, match=message):
            long_conv(x, filters, **how)
    with pytest.raises(ValueError, match="filters are 2 heads'"):
        long_conv(x[:, :, :1], filters)
    for empty in (x[:, :0], x[:0]):
        with pytest.raises(ValueError, match=r"must be \[B, T, H, D\] and not empty"):
            long_conv(empty, filters)
    with pytest.raises(
        ValueError, match="conv_filter='fir': must be one of taps, exponential, ssm"
    ):
        long_filters.get("fir")
    if INSTALLED:
        choose = long_filter_api.choose_backend
        assert choose("cuda", torch.bfloat16, 16).name == "triton"
        for dtype, state in ((torch.float64, 16), (torch.float32, 128)):
            assert choose("cuda", dtype, state).name == "reference"


def test_custom_filter_serves_a_model_by_its_name(monkeypatch):
    """A decay under another name: the same parameters, and the same logits."""
    table = long_filters.FILTERS
    monkeypatch.setattr(table, "_entries", dict(table._entries))
    long_filters.register(dataclasses.replace(long_filters.get("exponential"), name="mine"))
    models = []
    for name in ("exponential", "mine"):
        config = CatConfig(
            **{"vocab_size": 11, "hidden_size": 16, "intermediate_size": 16},
            **{"num_hidden_layers": 1, "num_attention_heads": 2, "attn_implementation": "eager"},
            **{"conv_type": "head", "conv_filter": name, "conv_state": 3},
        )
        torch.manual_seed(0)
        models.append(CatForCausalLM(config).eval())
    ids = torch.randint(11, (1, 9))
    assert torch.equal(*(model(ids).logits for model in models))
    with pytest.raises(ValueError, match=r"conv_filter='mien': .*; did you mean mine"):
        CatConfig(conv_type="head", conv_filter="mien", conv_state=3)
