"""Contracts of what models call for a layer: packed projections, and rotations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cat_lm import ops
from cat_lm.ops.convolution import kinds
from tests.contracts.operators import (
    BOUNDS,
    assert_close,
    convolution_backends,
    exact,
    with_gradients,
)
from tests.contracts.pairs import pairwise
from tests.reference import convolution as reference

BACKENDS = convolution_backends("head")
KINDS = [(kind, name) for kind in kinds.BUILT_IN for name in convolution_backends(kind)]
TABLE = pairwise(
    {
        "streams": ["qkv", "q", "k", "v", "qk", "kv", "qv"],
        "rotated": [0, 4, 16],
        "dtype": [torch.float32, torch.bfloat16],
        "documents": [True, False],
        "bias": [True, False],
        "window": [4, 1],
        "kind": ["head", "multihead"],
        "width": [16, 17],
    }
)
# Columns that are rotated beside others that are not, in two tiles of time and two of channels.
TABLE.append(dict(zip(TABLE[0], ("qkv", 16, torch.bfloat16, True, True, 21), strict=False)))
TABLE[-1] |= {"kind": "head", "width": 48}
NAMES = [" ".join(str(value) for value in row.values()) for row in TABLE]
IDS = (torch.arange(66) >= torch.tensor([[30], [65]])).long()
IDS[0] += (torch.arange(66) >= 31).long()


def angles(time: int, rotated: int, rows: int = 1) -> tuple[Tensor, Tensor] | None:
    """Return cosines and sines of any numbers: each is read in its place."""
    found = torch.randn(2, rows, time, rotated).unbind()
    return found if rotated else None


def turned(y: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    return y if rotary is None else reference.rotate(y, *(x.double() for x in rotary))


@pytest.mark.parametrize("row", range(len(TABLE)), ids=NAMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_projection_equals_reference_with_gradients(backend, row):
    torch.manual_seed(row)
    case, last = TABLE[row], row == len(TABLE) - 1
    time, width, kind = 66 if last else 9, case["width"], case["kind"]
    dtype, ids = case["dtype"], IDS[:, 66 - time :] if case["documents"] else None
    qkv = torch.randn(2, time, 2, 3, width + 8).to(dtype)[..., :width].requires_grad_()
    shape = kinds.get(kind).filter_shape(2, width, case["window"])
    filters = {s: torch.randn(shape).to(dtype) for s in case["streams"]}
    bias = torch.randn(2, 3, width).to(dtype) if case["bias"] else None
    leaves = [x.requires_grad_() for x in (qkv, *filters.values(), bias) if x is not None]
    rotary = angles(time, case["rotated"], rows=1 + row % 2)
    found = ops.convolve_qkv(
        kind,
        qkv,
        [filters.get(s) for s in "qkv"],
        bias,
        rotary=rotary,
        document_ids=ids,
        backend=backend,
    )
    same = exact(leaves)
    own = dict(zip(filters, same[1:], strict=False))
    wanted = []
    for i, stream in enumerate("qkv"):
        of, taps = (kind, own[stream]) if stream in own else ("head", torch.ones(2, 1).double())
        b = same[-1][:, i] if case["bias"] else None
        y = reference.convolve(of, same[0][:, :, :, i], taps, b, ids)
        wanted.append(turned(y, rotary if i < 2 else None))
    # The angles are rounded to half precision, and so is what is between two operators.
    bound = 2e-5 if dtype == torch.float32 else 2 * BOUNDS[dtype]
    assert_close(with_gradients(found, leaves, dtype), with_gradients(wanted, same), bound)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_projection_goes_on_from_its_state(backend):
    qkv, filters = torch.randn(2, 9, 3, 3, 6), [torch.randn(3, 4), None, torch.randn(3, 4)]
    whole = ops.head_conv_qkv(qkv, filters, backend=backend)
    state = qkv[:, 2:5, :, ::2]
    parts = ops.head_conv_qkv(qkv[:, 5:], filters, initial_state=state, backend=backend)
    assert_close(parts, [y[:, 5:] for y in whole], 1e-5)


WRONG = {
    r"qkv must be \[B, T, H, 3, D\]": {"qkv": torch.zeros(2, 9, 3, 2, 6)},
    "at least one not None": {"filters": (None, None, None)},
    r"windows \[2, 3\]": {"filters": (torch.zeros(3, 2), torch.zeros(3, 3), None)},
    r"bias must be \[3, 3, 6\]": {"bias": torch.zeros(3, 6)},
    r"must be \[2, 2, 3, 1, 6\]": {"initial_state": torch.zeros(2, 2, 3, 3, 6)},
    r"rotary must be .*\[2 or 1, 9, R\]": {"rotary": (torch.zeros(1, 8, 4),) * 2},
    "at most 6": {"rotary": (torch.zeros(1, 9, 8),) * 2},
    "must be one of auto": {"backend": "fastest"},
}


@pytest.mark.parametrize("message", WRONG)
def test_packed_projection_refuses_what_does_not_fit(message):
    given = {"qkv": torch.zeros(2, 9, 3, 3, 6), "filters": (torch.zeros(3, 3), None, None)}
    with pytest.raises(ValueError, match=message):
        ops.head_conv_qkv(**given | WRONG[message])


@pytest.mark.parametrize(("kind", "backend"), KINDS)
@pytest.mark.parametrize(
    ("width", "rotated", "state"), [(20, 6, False), (80, 80, False), (20, 6, True)]
)
def test_rotation_follows_convolution(kind, backend, width, rotated, state):
    torch.manual_seed(0)
    shape = kinds.get(kind).filter_shape(2, width, 3)
    leaves = [torch.randn(s).requires_grad_() for s in ((2, 9, 2, width), shape, (2, 2, 2, width))]
    rotary = angles(9, rotated, rows=2)
    how = {"initial_state": leaves[2]} if state else {"document_ids": IDS[:, 25:34]}
    used = leaves if state else leaves[:2]
    y = ops.convolve(kind, *leaves[:2], rotary=rotary, **how, backend=backend)
    same = exact(used)
    if state:
        wanted = reference.convolve(kind, torch.cat([same[2], same[0]], 1), same[1])[:, 2:]
    else:
        wanted = reference.convolve(kind, *same, documents=IDS[:, 25:34])
    wanted = with_gradients([turned(wanted, rotary)], same)
    assert_close(with_gradients([y], used), wanted, 1e-5)


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize(("shape", "rotated"), [((2, 5, 3, 24), 6), ((1, 1, 1, 16), 16)])
def test_rotation_equals_reference_with_gradients(backend, shape, rotated):
    leaf, rotary = torch.randn(shape).requires_grad_(), angles(shape[1], rotated)
    x = leaf.mT.contiguous().mT
    (same,) = exact([leaf])
    found = with_gradients([ops.rotate(x, *rotary, backend=backend)], [leaf])
    assert_close(found, with_gradients([turned(same, rotary)], [same]), 1e-6)
