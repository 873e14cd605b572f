"""Contracts of convolution kinds, for each kind of the registry and each backend that serves.

`test_other_processes.py` runs this file in Triton's interpreter and without a C++ compiler as well.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from cat_lm import ops
from cat_lm.ops.convolution import kinds
from cat_lm.ops.runtime.triton_launch import INSTALLED
from tests.contracts.operators import (
    BOUNDS,
    CONVOLUTIONS,
    assert_close,
    convolution_backends,
    exact,
    with_gradients,
)
from tests.contracts.pairs import pairwise
from tests.reference import convolution as reference

OPTIONS = {
    "dtype": [torch.float32, torch.float64, torch.bfloat16, torch.float16],
    "shape": [(2, 9, 3, 4), (1, 1, 1, 1), (2, 66, 2, 20)],  # one token; two tiles of 64
    "window": [3, 1, 21],
    "packing": [None, "ids", "lengths", "positions"],
    "bias": [True, False],
    "layout": ["contiguous", "packed", "transposed", "expanded"],
}
HALOS = [  # of a narrow halo, a wide one, and a window beyond the widest
    (torch.bfloat16, (2, 66, 2, 20), 21, "ids", True, "contiguous"),
    (torch.bfloat16, (1, 70, 1, 16), 100, "ids", True, "contiguous"),
    (torch.bfloat16, (1, 70, 1, 16), 130, None, True, "contiguous"),
]
TABLE = [*pairwise(OPTIONS), *(dict(zip(OPTIONS, row, strict=True)) for row in HALOS)]
NAMES = [" ".join(str(value) for value in row.values()) for row in TABLE]
# The interpreter is slow: halos, and a row of documents for each dtype; others nightly.
INTERPRETED_ROWS = {
    *range(len(TABLE) - len(HALOS), len(TABLE)),
    *(
        next(i for i, row in enumerate(TABLE) if row["dtype"] == dtype and row["packing"])
        for dtype in (torch.float32, torch.float16)
    ),
}
CASES = [
    pytest.param(
        *case,
        row,
        id=f"{case[0]}-{case[1]}-{name}",
        marks=[pytest.mark.nightly] * (case[1] == "triton" and row not in INTERPRETED_ROWS),
    )
    for case in CONVOLUTIONS
    for row, name in enumerate(NAMES)
]
each = pytest.mark.parametrize(("kind", "backend"), CONVOLUTIONS)


def documents(shape: tuple[int, ...]) -> Tensor:
    """Return ids of documents of one token, within tiles and across them, and one that recurs."""
    ids = [torch.arange(shape[0] * shape[1]).view(shape[:2]) // n % 3 for n in (1, 4, 31)]
    return torch.where(torch.arange(shape[1]) < 3, ids[0], ids[2 if shape[1] > 40 else 1])


def positions(ids: Tensor) -> Tensor:
    found = torch.zeros_like(ids)
    for t in range(1, ids.shape[1]):
        found[:, t] = torch.where(ids[:, t] == ids[:, t - 1], found[:, t - 1] + 1, 0)
    return found.int()


def packed(packing: str | None, shape: tuple[int, ...]) -> dict[str, Tensor]:
    ids = documents(shape)
    if packing == "lengths":  # an empty document, and lengths that run over the end of a row
        borders = (positions(ids) == 0).flatten().nonzero().flatten()
        borders = borders[borders % shape[1] > 0]
        end = torch.tensor([shape[0] * shape[1]])
        return {"cu_seqlens": torch.cat([torch.tensor([0, 0]), borders, end]).int()}
    return {"ids": {"document_ids": ids}, "positions": {"positions": positions(ids)}}.get(
        packing, {}
    )


def draw(kind: str, shape: tuple[int, ...], window: int, dtype: torch.dtype, bias: bool = True):
    """Return leaves: x, filters and bias."""
    torch.manual_seed(window)
    sizes = [shape, kinds.get(kind).filter_shape(*shape[2:], window), shape[2:]]
    return [torch.randn(s).to(dtype).requires_grad_() for s in sizes[: 3 if bias else 2]]


def arranged(x: Tensor, layout: str) -> Tensor:
    """Return x of other strides."""
    if layout == "packed":
        return torch.stack([x, x + 1, x], dim=3)[:, :, :, 2]
    if layout == "transposed":
        return x.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
    return x


@functools.cache
def defined(kind: str, row: int) -> list[Tensor]:
    """Return a row's result and gradients by the reference, once for all backends."""
    case = TABLE[row]
    leaves = exact(draw(kind, case["shape"], case["window"], case["dtype"], case["bias"]))
    ids = documents(case["shape"]) if case["packing"] else None
    x, filters, bias = (*leaves, None)[:3]
    y = reference.convolve(kind, x, filters, bias, ids)
    return with_upstream(y, leaves, case)


def with_upstream(y: Tensor, leaves: list[Tensor], case: dict) -> list[Tensor]:
    if case["layout"] == "expanded":  # the gradient of a sum
        return [y, *torch.autograd.grad(y.sum(), leaves)]
    return with_gradients([y], leaves, case["dtype"])


@pytest.mark.parametrize(("kind", "backend", "row"), CASES)
def test_kind_equals_reference_with_gradients(kind, backend, row):
    case = TABLE[row]
    leaves = draw(kind, case["shape"], case["window"], case["dtype"], case["bias"])
    how = packed(case["packing"], case["shape"])
    x = arranged(leaves[0], case["layout"])
    if (backend, case["dtype"]) == ("triton", torch.float64):
        with pytest.raises(ValueError, match="too coarse for"):
            ops.convolve(kind, x, *leaves[1:], **how, backend=backend)
        return
    y = ops.convolve(kind, x, *leaves[1:], **how, backend=backend)
    found = with_upstream(y, leaves, case)
    assert all(one.dtype == case["dtype"] for one in found)
    assert_close(found, defined(kind, row), BOUNDS[case["dtype"]])


@pytest.mark.parametrize(
    ("window", "cuts"),
    [(1, [4, 5]), (5, [1, 6, 2]), (12, [1] * 4 + [5])],
    ids=["one_tap", "usual_window", "long_window"],
)
@each
def test_chunks_with_state_equal_whole_forwards_and_backwards(kind, backend, window, cuts):
    leaves = draw(kind, (2, 9, 3, 4), window, torch.float32)
    state = torch.randn(2, window - 1, 3, 4).requires_grad_()
    held, outputs = state, []
    for part in leaves[0].split(cuts, dim=1):
        y, held = ops.convolve(
            kind, part, *leaves[1:], initial_state=held, return_state=True, backend=backend
        )
        outputs.append(y)
    found = with_gradients([torch.cat(outputs, dim=1), held], [*leaves, state])
    x, filters, bias, before = exact([*leaves, state])
    row = torch.cat([before, x], dim=1)
    y = reference.convolve(kind, row, filters, bias)[:, window - 1 :]
    wanted = with_gradients([y, row[:, 9:]], [x, filters, bias, before])
    assert_close(found, wanted, 1e-5)


@each
def test_document_and_future_change_no_bit(kind, backend):
    """Nor does the gradient of what stands on the other side."""
    x, filters, bias = (s.detach() for s in draw(kind, (1, 80, 2, 4), 6, torch.float32))
    ids = (torch.arange(80) >= 41).long()[None]
    found = []
    for scale in (1, 1e4):
        leaf = torch.cat([x[:, :41] * scale, x[:, 41:60], x[:, 60:] * scale], dim=1)
        leaf.requires_grad_()
        y = ops.convolve(kind, leaf, filters, bias, document_ids=ids, backend=backend)
        dy = torch.cat([torch.ones(1, 41, 2, 4), torch.full((1, 39, 2, 4), float(scale))], dim=1)
        found.append((y[:, 41:60], torch.autograd.grad(y, leaf, dy)[0][:, :41]))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each
def test_same_bits_twice_and_with_more_threads(kind, backend, dtype):
    shape = (1, 70, 1, 20) if backend == "triton" else (3, 300, 3, 20)
    leaves, before, found = draw(kind, shape, 9, dtype), torch.get_num_threads(), []
    try:
        for threads in (1, 1, 3):
            torch.set_num_threads(threads)
            y = ops.convolve(kind, *leaves, backend=backend)
            found.append(with_gradients([y], leaves))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (1, 2)], ids=str)
@each
def test_gradients_of_some_inputs(kind, backend, wanted):
    leaves = draw(kind, (1, 9, 2, 4), 3, torch.float32)
    every = with_gradients([ops.convolve(kind, *leaves, backend=backend)], leaves)[1:]
    given = [leaf if i in wanted else leaf.detach() for i, leaf in enumerate(leaves)]
    y = ops.convolve(kind, *given, backend=backend)
    found = with_gradients([y], [leaves[i] for i in wanted])[1:]
    assert_close(found, [every[i] for i in wanted], 1e-6)


@pytest.mark.parametrize(
    ("stacked", "packing"),
    [((0, 1, 2), None), ((0,), "ids"), ((1,), "ids"), ((1, 2), None)],
    ids=["all", "x", "filters", "filters and bias"],
)
@each
def test_vmap_equals_loop_forwards_and_backwards(kind, backend, stacked, packing):
    torch.manual_seed(0)
    leaves = draw(kind, (2, 9, 2, 4), 3, torch.float32)
    axes = [axis if i in stacked else None for i, axis in enumerate((1, 0, 2))]
    for i in stacked:
        parts = torch.stack([leaves[i].detach() * scale for scale in (1, -2, 3)], dim=axes[i])
        leaves[i] = parts.requires_grad_()
    how = packed(packing, (2, 9, 2, 4))

    def convolve(*given: Tensor) -> Tensor:
        return ops.convolve(kind, *given, **how, backend=backend).sin()

    def single(i: int) -> list[Tensor]:
        return [x if a is None else x.select(a, i) for x, a in zip(leaves, axes, strict=True)]

    y = torch.vmap(convolve, tuple(axes))(*leaves)
    wanted = torch.stack([convolve(*single(i)) for i in range(3)])
    assert_close(with_gradients([y], leaves), with_gradients([wanted], leaves), 1e-5)


@each
def test_many_gradients_at_once_and_compiled_without_break(kind, backend):
    leaves = draw(kind, (2, 9, 2, 16), 3, torch.float32)

    def convolve(*given: Tensor) -> Tensor:
        return ops.convolve(kind, *given, document_ids=documents((2, 9)), backend=backend)

    y = convolve(*leaves)
    many = torch.randn(3, *y.shape)
    found = torch.autograd.grad(y, leaves, many, is_grads_batched=True, retain_graph=True)
    wanted = [torch.autograd.grad(y, leaves, dy, retain_graph=True) for dy in many]
    assert_close(found, [torch.stack(parts) for parts in zip(*wanted, strict=True)], 1e-5)
    compiled = torch.compile(convolve, fullgraph=True, backend="aot_eager")(*leaves)
    assert_close(with_gradients([compiled], leaves), with_gradients([y], leaves), 1e-6)


@each
def test_second_derivative_is_right_or_refused(kind, backend):
    dtype = torch.float32 if backend == "triton" else torch.float64
    leaves = draw(kind, (1, 5, 2, 2), 3, dtype)

    def convolve(*given: Tensor) -> Tensor:
        return ops.convolve(kind, *given, backend=backend)

    if backend == "reference":
        assert torch.autograd.gradgradcheck(lambda *given: convolve(*given).sin(), leaves)
        return
    with pytest.raises((RuntimeError, NotImplementedError)):
        first = torch.autograd.grad(convolve(*leaves).sin().sum(), leaves, create_graph=True)
        sum(x.square().sum() for x in first).backward()
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.func.jvp(convolve, tuple(leaves), tuple(torch.ones_like(x) for x in leaves))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_half_precision_is_rounded_as_torch_rounds(backend, dtype):
    """All 2¹⁶ numbers, and sums that lie between them."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    numbers, one = bits.view(dtype), torch.ones(1, 1, dtype=dtype)
    # A row each: an infinity may spread over its row.
    same = ops.convolve("head", numbers.view(-1, 1, 1, 64), one, backend=backend)
    # Matrix products of torch flush what is subnormal in fp32.
    torch.testing.assert_close(same.flatten(), numbers, rtol=0, atol=2**-126, equal_nan=True)
    bias = torch.tensor([[2.0**-9, 3 * 2.0**-12, 1.0, 2.0**-25]], dtype=dtype)
    finite = numbers[numbers.isfinite()]
    x = finite[: finite.numel() // 4 * 4].view(1, -1, 1, 4)
    y = ops.convolve("head", x, one, bias, backend=backend)
    torch.testing.assert_close(y, (x.float() + bias.float()).to(dtype), rtol=0, atol=2**-126)


WRONG = {
    r"filters must be \[3, W\]": {"filters": torch.zeros(2, 3)},
    "W >= 1": {"filters": torch.zeros(3, 0)},
    r"bias must be \[3, 4\]": {"bias": torch.zeros(3)},
    r"\[2, 9\] integers, not \[2, 8\]": {"document_ids": torch.zeros(2, 8).long()},
    r"not \[2, 9\] torch.float32": {"document_ids": torch.zeros(2, 9)},
    r"initial_state must be \[2, 2, 3, 4\]": {"initial_state": torch.zeros(2, 3, 3, 4)},
    r"not \[9\] torch.float32": {"cu_seqlens": torch.zeros(9)},
    "must rise from 0 to 18": {"cu_seqlens": torch.tensor([0, 17])},
    "positions must be": {"positions": torch.zeros(2, 9).long()},
    "not both": {"document_ids": torch.zeros(2, 9).long(), "cu_seqlens": torch.tensor([0, 18])},
    "together with a state": {"document_ids": torch.zeros(2, 9).long(), "return_state": True},
    "cannot be used together": {
        "cu_seqlens": torch.tensor([0, 18]),
        "initial_state": torch.zeros(2, 2, 3, 4),
    },
    "rotary must be": {"rotary": (torch.zeros(1, 8, 4),) * 2},
    "not empty": {"x": torch.zeros(0, 9, 3, 4)},
    "and not empty": {"x": torch.zeros(2, 0, 3, 4)},
    "x must be": {"x": torch.zeros(2, 9, 12)},
    "must be one of none, head, depthwise, multihead": {"conv_type": "nowhere"},
}


@pytest.mark.parametrize("message", WRONG)
def test_refuses_what_does_not_fit(message):
    given = {"conv_type": "head", "x": torch.zeros(2, 9, 3, 4), "filters": torch.zeros(3, 3)}
    with pytest.raises(ValueError, match=message):
        ops.convolve(**given | WRONG[message])


@pytest.mark.parametrize("kind", kinds.names())
def test_kind_describes_its_filters(kind):
    row = kinds.get(kind)
    shape = row.filter_shape(3, 4, 5)
    filters, x = torch.randn(shape, dtype=torch.float64), torch.randn(2, 7, 3, 4).double()
    assert row.window_of(filters) == 5 and row.window_axis == reference.WINDOW_AXIS[kind]
    assert row.meaning
    identity = row.identity(3, 4, 5)
    assert tuple(identity.shape) == shape
    assert torch.equal(ops.convolve(kind, x, identity.double(), backend="reference"), x)
    # What an output reads: the taps that a gradient of one number of it reaches.
    filters.requires_grad_()
    y = ops.convolve(kind, x, filters, backend="reference")
    (reached,) = torch.autograd.grad(y[0, 6, 1, 2], filters)
    assert (reached != 0).sum() == row.fan_in(3, 5)
    assert (row.normalized(filters).abs() * (reached != 0)).sum().item() == pytest.approx(1)
    heads = (
        torch.autograd.functional.jacobian(
            lambda x: ops.convolve(kind, x, filters.detach(), backend="reference")[0, 6, 1, 2], x
        )[0]
        .abs()
        .sum((0, 2))
    )
    assert bool((heads[[0, 2]] != 0).any()) == row.mixes_heads == kinds.mixes_heads(kind)


@pytest.mark.parametrize("kind", kinds.BUILT_IN)
def test_built_in_kind_has_a_kernel_on_each_device(kind):
    sizes = {"window": 21, "heads": 8, "head_dim": 64, "dtype": torch.bfloat16}
    assert ops.choose_backend(kind, device="cpu", **sizes).name == "cpu"
    assert ops.choose_backend(kind, device="meta", **sizes).name == "reference"
    for name in ops.BACKENDS.names():
        assert ops.BACKENDS.get(name).describe(kind, torch.bfloat16, 21), name
    if INSTALLED:
        assert ops.choose_backend(kind, device="cuda", **sizes).name == "triton"
    for window in (0, -1):
        with pytest.raises(ValueError, match=f"window={window}"):
            ops.choose_backend(kind, device="cpu", **sizes | {"window": window})
    for dtype in (torch.int64, torch.float8_e4m3fn, torch.complex64):
        with pytest.raises(ValueError, match="cannot be convolved; use one of float32"):
            ops.choose_backend(kind, device="cpu", **sizes | {"dtype": dtype})
    for backend in ("nowhere", "triton", "cpu"):
        with pytest.raises(ValueError, match=f"backend='{backend}'"):
            ops.choose_backend(kind, device="meta", **sizes, backend=backend)


def test_kind_without_kernel_is_served_by_reference_only(monkeypatch):
    """A kernel that is named and has no row for the kind is an error."""
    monkeypatch.setattr(kinds.KINDS, "_entries", dict(kinds.KINDS._entries))
    kinds.register(
        kinds.Kind("shared", ("W",), lambda taps, lag, past: taps[lag] * past, "one for all")
    )
    assert convolution_backends("shared") == ["reference"]
    x, taps = torch.randn(2, 9, 3, 4), torch.randn(4)
    wanted = reference.convolve("head", x, taps.expand(3, -1))
    assert_close([ops.convolve("shared", x, taps)], [wanted], 1e-6)
    with pytest.raises(ValueError, match=r"backend='cpu' cannot serve.*no kernel for shared"):
        ops.convolve("shared", x, taps, backend="cpu")
