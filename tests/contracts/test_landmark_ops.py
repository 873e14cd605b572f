"""Contracts of landmark attention: landmarks, the choice of blocks, and each backend."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.contracts import landmark_operators as op
from tests.contracts.operators import (
    INTERPRETED,
    assert_close,
    exact,
    long_filters,
    with_gradients,
)
from tests.reference import landmark as reference
from tests.reference.long_filter import long_taps

BLOCK, SCALING, TIME = 4, 0.4, 26
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 2 + [2] * 15, [0] * 4 + [1] * 22])
LEFT = torch.arange(TIME) >= torch.tensor([[0], [5]])
ENDS = torch.arange(TIME) < torch.tensor([[26], [17]])
ROWS = {
    "plain": (None, None),
    "documents": (DOCUMENTS, None),
    "padding": (None, LEFT),
    "documents and padding": (DOCUMENTS, LEFT & ENDS),
}
CHOICES = {  # the choice, the filter, and heads of keys beside four of queries
    "heads apart": (op.Choice(2, 2), "box", 4),
    "shared keys": (op.Choice(1, 1), "exponential", 2),
    "layer, sink": (op.Choice(2, 1, sink=True, share="layer"), "box", 2),
    "local only": (op.Choice(0, 2), "box", 2),
    "one key": (op.Choice(1, 2, sink=True), "exponential", 1),
    "all": (op.Choice(99, 1), "box", 2),
}
BACKENDS = {
    "eager": lambda *given: op.attend_blocks("eager", *given, 0.0)[0],
    "sdpa": lambda *given: op.attend_by_masks(*given, 0.0, False)[0],
    "gather": op.attend_gathered,
} | ({"triton": op.attend_segments} if INTERPRETED else {})
each_backend = pytest.mark.parametrize("backend", BACKENDS)
# The interpreter is slow: each choice and each row once.
CASES = [
    (case, row, name)
    for i, case in enumerate(CHOICES)
    for j, row in enumerate(ROWS)
    for name in BACKENDS
    if name != "triton" or i % len(ROWS) == j
]
each_choice = pytest.mark.parametrize("case", CHOICES)
each_row = pytest.mark.parametrize("row", ROWS)


def draw(time: int, keys: int, dtype: torch.dtype = torch.float64, heads: int = 4) -> list[Tensor]:
    """Return queries, keys and values [B, H, T, D]."""
    generator = torch.Generator().manual_seed(keys)
    drawn = [torch.randn(2, n, time, 8, generator=generator) for n in (heads, keys, keys)]
    return [x.to(dtype).requires_grad_() for x in drawn]


def chosen(query: Tensor, key: Tensor, case: str, row: str) -> tuple:
    """Return places of blocks, their layout and the number of local ones."""
    choice, name, _ = CHOICES[case]
    documents, padding = ROWS[row]
    layout = op.sequence_blocks(query.shape[2], BLOCK, documents, padding, query.device)
    weights = op.block_weights(name, BLOCK)
    marks = op.landmark_keys(key, weights, layout, name == "exponential")
    return op.choose_blocks(query, marks, layout, choice), layout, choice.local


@functools.cache
def defined(case: str, row: str) -> list[Tensor]:
    """Return the outputs and gradients of a case, zeros at padding."""
    choice, name, keys = CHOICES[case]
    leaves = draw(TIME, keys)
    y = reference.attend(*leaves, name, BLOCK, choice, SCALING, *ROWS[row])
    return with_gradients([y], leaves)


@pytest.mark.parametrize(("case", "row", "backend"), CASES)
def test_backend_equals_reference_with_gradients(case, row, backend):
    dtype = torch.float32 if backend == "triton" else torch.float64
    leaves, padding = draw(TIME, CHOICES[case][2], dtype), ROWS[row][1]
    selected, layout, local = chosen(*leaves[:2], case, row)
    y = BACKENDS[backend](*leaves, selected, layout, local, SCALING)
    assert y.isfinite().all()
    if padding is not None:
        y = y.where(padding[:, None, :, None], 0.0)
    assert_close(with_gradients([y], leaves), defined(case, row), 1e-5 if INTERPRETED else 1e-9)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "eager"])
@pytest.mark.parametrize("packed", [False, True])
def test_long_rows_equal_masks_with_gradients(backend, packed):
    """Rows of more queries than are taken at a time, of which many choose one block."""
    time = 40 if backend == "triton" else 600
    dtype = torch.float32 if backend == "triton" else torch.float64
    documents = torch.arange(time).expand(2, -1) // 170 if packed else None
    leaves = draw(time, 2, dtype)
    layout = op.sequence_blocks(time, BLOCK, documents, None, leaves[0].device)
    marks = op.landmark_keys(leaves[1], op.block_weights("box", BLOCK), layout, False)
    marks = marks * (1 + 9 * (layout.numbers == 1)[:, None, :, None])
    given = op.choose_blocks(leaves[0], marks, layout, op.Choice(2, 1)), layout, 1, SCALING
    found, wanted = (BACKENDS[name](*leaves, *given) for name in (backend, "eager"))
    bound = 2e-5 if backend == "triton" else 1e-9
    assert_close(with_gradients([found], leaves), with_gradients([wanted], leaves), bound)


@each_choice
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_equals_reference_after_any_cache(case, dtype):
    """One and several queries are decoded beside padding, by the kernel and without it."""
    choice, name, keys = CHOICES[case]
    query, key, value = (x.detach() for x in draw(TIME, keys, dtype))
    # As a cache has them: part of a longer buffer, and more space than landmarks.
    key, value = (F.pad(x, (0, 0, 0, 6))[:, :, :TIME] for x in (key, value))
    for padding, pads in ((None, [0]), (LEFT, [0, 5])):
        same = exact([query, key, value])
        wanted = reference.attend(*same, name, BLOCK, choice, SCALING, None, padding).detach()
        layout = op.sequence_blocks(TIME, BLOCK, None, padding, query.device)
        weights = op.block_weights(name, BLOCK)
        marks = op.landmark_keys(key.double(), weights, layout, name == "exponential").to(dtype)
        marks = F.pad(marks, (0, 0, 0, 2), value=torch.nan)
        for past, time in ((25, 1), (20, 6), (0, 16)):
            new = slice(past, past + time)
            real = slice(None) if padding is None else padding[:, new]
            seen = [x[:, :, : past + time] for x in (key, value)]
            call = (marks, past, torch.tensor(pads), BLOCK, choice, SCALING)
            own = op.cached_blocks(past, time, BLOCK, torch.tensor(pads))
            usable = marks[:, :, : own.numbers.shape[1]].nan_to_num()
            places = op.choose_blocks(query[:, :, new], usable, own, choice)
            found = [op.decode(query[:, :, new], *seen, *call)]
            given = query[:, :, new], *seen, places, own, choice.local, SCALING
            found += [run(*given) for run in BACKENDS.values()]
            for y in found:
                pair = (x.transpose(1, 2)[real] for x in (y, wanted[:, :, new]))
                assert y.dtype == dtype
                if dtype == torch.float32:
                    assert_close(*([x] for x in pair), 1e-5)
                elif case in ("all", "local only"):  # rounded scores may choose other blocks
                    assert_close(*([x] for x in pair), 1e-2)


def test_equal_scores_go_to_the_earlier_block():
    query, key, value = (x.detach() for x in draw(24, 2, torch.float32, heads=2))
    marks, choice, past = torch.zeros(2, 2, 6, 8), op.Choice(2, 1), 23
    read = [*range(8), *range(20, 24)]
    layout = op.sequence_blocks(24, BLOCK, None, None, query.device)
    places = op.choose_blocks(query, marks, layout, choice)[:, :, -1]
    assert places.tolist() == [[[0, 1], [0, 1]]] * 2
    for x in (key, value):
        x[:, :, 8:20] = torch.nan  # no other block is read
    call = (query[:, :, -1:], key, value, marks, past)
    found = op.decode(*call, torch.tensor([0]), BLOCK, choice, SCALING)
    wanted = F.scaled_dot_product_attention(
        query[:, :, -1:], key[:, :, read], value[:, :, read], scale=SCALING
    )
    assert_close([found], [wanted], 1e-5)


@each_backend
def test_token_changes_no_bit_before_it(backend):
    dtype = torch.float32 if backend == "triton" else torch.float64
    given = [x.detach() for x in draw(TIME, 2, dtype)]
    before = BACKENDS[backend](*given, *chosen(*given[:2], "shared keys", "plain"), SCALING)
    for token in (3, 4, 21):
        changed = [x.clone() for x in given]
        for x in changed:
            x[:, :, token] += 5
        places = chosen(*changed[:2], "shared keys", "plain")
        after = BACKENDS[backend](*changed, *places, SCALING)
        assert torch.equal(after[:, :, :token], before[:, :, :token])
        assert not torch.equal(after[:, :, token], before[:, :, token])


@pytest.mark.parametrize("name", long_filters.names())
@each_row
def test_long_filters_make_landmarks_of_all_keys_of_a_document(row, name):
    documents, padding = ROWS[row]
    filters, key = long_filters.get(name), draw(TIME, 2)[1].detach()
    torch.manual_seed(1)
    numbers = filters.average(2, 4, BLOCK).double()
    numbers = numbers + 0.3 * torch.randn_like(numbers)
    modes, taps = filters.modes_of(numbers, 4), long_taps(name, numbers, 4, TIME)
    layout = op.sequence_blocks(TIME, BLOCK, documents, padding, key.device)
    found = op.landmark_keys(key, modes, layout)
    for number in range(2):
        wanted = []
        for slots in reference.documents_of(documents, padding, number, TIME):
            for end in range(BLOCK - 1, len(slots), BLOCK):
                earlier = key[number][:, slots[: end + 1]].flip(1)
                wanted.append(torch.einsum("hj,hjd->hd", taps[:, : end + 1], earlier))
        assert_close([found[number, :, : len(wanted)]], [torch.stack(wanted, dim=1)], 1e-9)
        assert not found[number, :, len(wanted) :].any()
    if row == "plain":
        blocks, state, made = key[:, :, :24].unflatten(2, (6, BLOCK)), None, []
        for part in blocks.split((2, 1, 3), dim=2):
            marks, state = op.next_landmarks(part, modes, False, state)
            made.append(marks)
        assert_close([torch.cat(made, dim=2)], [found], 1e-9)


@each_row
@pytest.mark.parametrize("few", [0, 64])
def test_mass_of_blocks_equals_reference(row, few, monkeypatch):
    monkeypatch.setattr(op.teaching, "FEW_BLOCKS", few)
    documents, padding = ROWS[row]
    query, key, _ = (x.detach() for x in draw(TIME, 2))
    layout = op.sequence_blocks(TIME, BLOCK, documents, padding, query.device)
    found, wanted = op.block_mass(query, key, layout, 1, 0.3), []
    wanted = torch.zeros_like(found)
    for number in range(2):
        place = 0
        for slots in reference.documents_of(documents, padding, number, TIME):
            for head in range(4):
                own = query[number, head], key[number, head // 2]
                mass = reference.block_mass(*own, slots, BLOCK, 0.3)
                wanted[number, head, slots, place : place + mass.shape[1]] = mass
            place += len(slots) // BLOCK
    assert_close([found], [wanted], 1e-9)


def test_scores_are_not_rounded_by_autocast():
    query, marks = torch.randn(1, 2, 5, 64).bfloat16(), torch.randn(1, 2, 3, 64).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        scores = op.landmark_scores(query, marks)
    assert scores.dtype == torch.float32
    assert_close([scores], [query.double() @ marks.double().mT], 1e-6)


def test_which_backend_computes_is_an_error_or_serves():
    many, few = 5000, 16
    for by, queries, keys, dropout, triton, name in (
        ("eager", many, many, 0.1, True, "reference"),
        ("sdpa", few, many, 0.0, True, "gather"),
        ("sdpa", few, few, 0.0, True, "triton"),
        ("sdpa", many, many, 0.1, True, "reference"),
        ("sdpa", many, many, 0.0, False, "reference"),
        ("sdpa", few, few, 0.0, False, "reference"),
    ):
        assert op.choose_backend(by, queries, keys, dropout, triton) == name
    gpu, half = torch.device("cuda"), torch.bfloat16
    for device, dtype, block, width, named in (
        (torch.device("meta"), half, 64, 64, "the inputs are on meta"),
        (gpu, torch.float64, 64, 64, "too coarse for torch.float64"),
        (gpu, half, 129, 65, "are 32768 numbers of its 16384"),
        (gpu, torch.float32, 64, 80, "8192 numbers of its 4096 in float32"),
    ):
        assert named in op.why_not(device, dtype, block, width)


def test_decoding_reads_nothing_that_is_not_there():
    query, key, value = (x.detach() for x in draw(24, 2, torch.float32))
    query, marks = query[:, :, -1:], torch.zeros(2, 2, 6, 8)

    def run(query, key, value, marks, past=23, local=2):
        pads = torch.tensor([0])
        return op.decode(query, key, value, marks, past, pads, BLOCK, op.Choice(2, local), SCALING)

    assert run(query, key, value, marks).isfinite().all()
    for given in (
        (query, key, value, marks, 24),
        (query, key, value, marks[:, :, :3]),
        (query, key, value, marks[:1]),
        (query, key, value, marks.bfloat16()),
        (query, key, value[:, :, :-1], marks),
        (query, key[..., :4], value[..., :4], marks),
        (query, key, value, marks, 23, 0),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            run(*given)
