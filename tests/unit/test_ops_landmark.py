"""Landmarks, the choice of blocks and attention to them, against loops over the definition."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from cat_lm.ops.landmark import blocks, reference, segments, select
from cat_lm.ops.landmark import decode as kernel
from cat_lm.ops.landmark.blocks import attend_block_major
from cat_lm.ops.landmark.dispatch import attend_blocks, choose_backend
from cat_lm.ops.landmark.gather import attend_gathered
from cat_lm.ops.landmark.keys import block_weights, landmark_keys
from cat_lm.ops.landmark.layout import (
    interior_padding,
    sequence_blocks,
    take_slots,
)
from cat_lm.ops.landmark.select import Choice, choose_blocks, landmark_scores, select_blocks
from cat_lm.ops.landmark.step import attend_one
from cat_lm.ops.landmark.teaching import block_mass

BLOCK = 4
SCALING = 0.4


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Rows of a few tokens are taken in several parts, as long ones are."""
    monkeypatch.setattr(blocks, "TILE", 3)
    monkeypatch.setattr(blocks, "TILES", 2)
    monkeypatch.setattr(blocks, "LOCAL_CHUNK", 5)
    monkeypatch.setattr(select, "QUERY_CHUNK", 7)
    monkeypatch.setattr(reference, "QUERY_CHUNK", 6)


SPARSE = {"gather": attend_gathered, "blocks": attend_block_major}


def backend(name, query, key, value, selected, layout, local):
    given = (query, key, value, selected, layout, local, SCALING)
    return SPARSE[name](*given) if name in SPARSE else attend_blocks(name, *given, 0.0)[0]


def drawn(time, heads=4, kv_heads=2, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(batch, count, time, 8, generator=generator, dtype=torch.float64)
        for count in (heads, kv_heads, kv_heads)
    )


def rows_of(documents, padding, batch, time):
    """Each row's documents, as lists of the slots of their tokens."""
    for row in range(batch):
        found = {}
        for slot in range(time):
            if padding is None or padding[row, slot]:
                document = 0 if documents is None else int(documents[row, slot])
                found.setdefault(document, []).append(slot)
        yield row, list(found.values())


def naive_landmarks(keys, name):
    """Of the keys [tokens, D] of a document: a sum over all its keys up to a block's end."""
    landmarks = []
    for end in range(BLOCK - 1, len(keys), BLOCK):
        reach = end + 1 if name == "exponential" else BLOCK
        if name == "box":
            weights = [1 / BLOCK] * reach
        else:
            rate = math.exp(-1 / BLOCK)
            total = sum(rate**lag for lag in range(BLOCK))
            weights = [rate**lag / total for lag in range(reach)]
        landmarks.append(sum(weights[lag] * keys[end - lag] for lag in range(reach)))
    return landmarks


def naive(query, key, value, name, choice, documents=None, padding=None):
    """The definition, a token and a head at a time."""
    batch, heads, time, _ = query.shape
    groups = heads // key.shape[1]
    output = torch.zeros_like(query)
    for row, row_documents in rows_of(documents, padding, batch, time):
        for slots in row_documents:
            marks = [
                naive_landmarks([key[row, head, s] for s in slots], name)
                for head in range(key.shape[1])
            ]
            for place, slot in enumerate(slots):
                own = place // BLOCK
                old = list(range(max(0, own - choice.local + 1)))
                free = [j for j in old if not (choice.sink and j == 0)]

                def score(head, j, row=row, slot=slot, marks=marks):
                    return float(query[row, head, slot] @ marks[head // groups][j])

                def shares(together, row=row, slot=slot, free=free, score=score):
                    total = dict.fromkeys(free, 0.0)
                    for head in together:
                        norm = sum(math.exp(score(head, j)) for j in free)
                        for j in free:
                            total[j] += math.exp(score(head, j)) / norm
                    return total

                for head in range(heads):
                    if choice.share == "layer":
                        rank = shares(range(heads))
                    elif groups > 1:
                        first = head // groups * groups
                        rank = shares(range(first, first + groups))
                    else:
                        rank = {j: score(head, j) for j in free}
                    best = sorted(free, key=lambda j: (-rank[j], j))[: choice.top_k]
                    best += [0] if choice.sink and 0 in old else []
                    near = slots[max(0, own - choice.local + 1) * BLOCK : place + 1]
                    kv = head // groups

                    def logit(s, row=row, head=head, slot=slot, kv=kv):
                        return float(query[row, head, slot] @ key[row, kv, s]) * SCALING

                    far = [slots[j * BLOCK : (j + 1) * BLOCK] for j in best]
                    seen = near + [s for block in far for s in block]
                    weight = [math.exp(logit(s)) for s in seen]
                    total = sum(weight)
                    for s, part in zip(seen, weight, strict=True):
                        output[row, head, slot] += part / total * value[row, kv, s]
    return output


DOCUMENTS = torch.tensor([[0] * 9 + [1] * 2 + [2] * 15, [0] * 4 + [1] * 22])
LEFT = torch.arange(26) >= torch.tensor([[0], [5]])
ENDS = torch.arange(26) < torch.tensor([[26], [17]])
ROWS = {
    "plain": (None, None),
    "documents": (DOCUMENTS, None),
    "left padding": (None, LEFT),
    "documents and padding": (DOCUMENTS, LEFT & ENDS),
}
CHOICES = {
    "head": (Choice(2, 2), "box"),
    "the paper": (Choice(1, 1), "exponential"),
    "layer, sink": (Choice(2, 1, sink=True, share="layer"), "box"),
    "local only": (Choice(0, 2), "box"),
    "layer": (Choice(1, 2, sink=True, share="layer"), "exponential"),
}


@pytest.mark.parametrize("case", CHOICES)
@pytest.mark.parametrize("rows", ROWS)
def test_backends_equal_loops_over_the_definition(rows, case):
    (documents, padding), (choice, name) = ROWS[rows], CHOICES[case]
    heads = (4, 4) if case == "head" else (4, 2)  # MoBA's case: no sharing at all
    query, key, value = drawn(26, *heads)
    layout = sequence_blocks(26, BLOCK, documents, padding, query.device)
    marks = landmark_keys(key, block_weights(name, BLOCK), layout, name == "exponential")
    selected = choose_blocks(query, marks, layout, choice)
    expected = naive(query, key, value, name, choice, documents, padding)
    real = slice(None) if padding is None else padding
    for one in ("eager", "sdpa", "gather", "blocks"):
        found = backend(one, query, key, value, selected, layout, choice.local)
        assert found.isfinite().all()
        found, wanted = (x.transpose(1, 2)[real] for x in (found, expected))
        torch.testing.assert_close(found, wanted, msg=lambda text, one=one: f"{one}: {text}")


@pytest.mark.parametrize("time", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3])
@pytest.mark.parametrize("one", ["eager", "sdpa", "gather", "blocks"])
def test_all_blocks_are_dense_attention_with_its_gradients(one, time):
    inputs = [x.requires_grad_() for x in drawn(time)]
    query, key, value = inputs
    layout = sequence_blocks(time, BLOCK, None, None, query.device)
    marks = landmark_keys(key, block_weights("box", BLOCK), layout, False)
    selected = choose_blocks(query, marks, layout, Choice(99, 1))
    ours = backend(one, query, key, value, selected, layout, 1)
    keys, values = (x.repeat_interleave(2, dim=1) for x in (key, value))
    dense = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=SCALING)
    torch.testing.assert_close(ours, dense)
    weights = torch.randn_like(dense)
    for found, wanted in zip(
        torch.autograd.grad((ours * weights).sum(), inputs),
        torch.autograd.grad((dense * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted)


def test_which_backend_computes():
    many, few = 5000, 16
    for by, queries, keys, dropout, triton, name in (
        ("eager", many, many, 0.1, True, "reference"),
        ("sdpa", few, many, 0.0, True, "gather"),
        ("sdpa", few, few, 0.0, True, "triton"),
        ("sdpa", many, many, 0.0, True, "triton"),
        ("sdpa", many, many, 0.1, True, "reference"),
        ("sdpa", many, many, 0.0, False, "blocks"),
        ("sdpa", few, few, 0.0, False, "reference"),
    ):
        assert choose_backend(by, queries, keys, dropout, triton) == name


def test_why_the_triton_kernel_does_not_serve(monkeypatch):
    monkeypatch.setattr(segments, "INSTALLED", True)
    gpu, half = torch.device("cuda"), torch.bfloat16
    assert segments.why_not(gpu, half, 128, 128) is None
    for device, dtype, block, width, named in (
        (torch.device("cpu"), half, 64, 64, "cuda tensors, not cpu"),
        (gpu, torch.float64, 64, 64, "no float64"),
        (gpu, half, 129, 65, "block=129 by heads of 65 channels are 32768 numbers of its 16384"),
        (gpu, torch.float32, 64, 80, "8192 numbers of its 4096 in float32"),
    ):
        assert named in segments.why_not(device, dtype, block, width)
    monkeypatch.setattr(segments, "INSTALLED", False)
    assert segments.why_not(gpu, half, 64, 64) == "triton is not installed"


def moba(query, key, value, block, top_k):
    """MoBA (arXiv:2502.13189, equations 2 to 5): own block first, then the best earlier means."""
    time = query.shape[0]
    output = torch.zeros_like(query)
    for t in range(time):
        means = [key[i * block : (i + 1) * block].mean(0) for i in range(t // block)]
        gates = torch.stack([query[t] @ mean for mean in means]) if means else torch.zeros(0)
        blocks = [t // block, *gates.topk(min(top_k - 1, len(means))).indices.tolist()]
        slots = [s for i in blocks for s in range(i * block, (i + 1) * block) if s <= t]
        output[t] = (key[slots] @ query[t] * SCALING).softmax(0) @ value[slots]
    return output


def test_moba_is_box_with_one_local_block():
    query, key, value = drawn(27, 3, 3)
    layout = sequence_blocks(27, BLOCK, None, None, query.device)
    marks = landmark_keys(key, block_weights("box", BLOCK), layout, False)
    selected = choose_blocks(query, marks, layout, Choice(3 - 1, 1))
    ours = backend("sdpa", query, key, value, selected, layout, 1)
    for row in range(2):
        for head in range(3):
            theirs = moba(query[row, head], key[row, head], value[row, head], BLOCK, 3)
            torch.testing.assert_close(ours[row, head], theirs)


def test_equal_scores_go_to_the_earlier_block():
    layout = sequence_blocks(24, BLOCK, None, None, torch.device("cpu"))
    scores = torch.tensor([1.0, 1.0, 1.0, 1.0, 2.0, 9.0]).expand(1, 1, 24, 6)
    selected = select_blocks(scores, layout, Choice(3, 1), 1)[0, 0]
    assert selected[-1].tolist() == [0, 1, 4]
    assert selected[4].tolist() == [0, -1, -1] and selected[3].tolist() == [-1, -1, -1]


@pytest.mark.parametrize("rows", [1, 2])
def test_slots_are_taken_alike_from_tokens_and_from_heads_side_by_side(rows):
    by_head = torch.randn(2, 3, 10, 4, dtype=torch.float64).requires_grad_()
    by_token = by_head.detach().transpose(1, 2).contiguous().requires_grad_()
    slots = torch.randint(10, (rows, 5, 2))
    found = [take_slots(x, slots) for x in (by_head, by_token.transpose(1, 2))]
    expected = torch.stack([by_head[b][:, slots[b % rows]] for b in range(2)])
    assert all(torch.equal(x, expected) for x in found)
    weights = torch.randn_like(expected)
    of_heads, of_tokens = (
        torch.autograd.grad(x, y, weights)[0]
        for x, y in zip(found, (by_head, by_token), strict=True)
    )
    torch.testing.assert_close(of_tokens.transpose(1, 2), of_heads, rtol=1e-12, atol=1e-12)


def test_scores_are_not_rounded_by_autocast():
    query, landmarks = torch.randn(1, 2, 5, 64), torch.randn(1, 2, 3, 64)
    with torch.autocast("cpu", torch.bfloat16):
        scores = landmark_scores(query.bfloat16(), landmarks.bfloat16())
    products = query.bfloat16().double() @ landmarks.bfloat16().double().mT
    assert scores.dtype == torch.float32
    assert torch.allclose(scores.double(), products, rtol=0, atol=1e-4)


@pytest.mark.parametrize("few", [0, 64])
@pytest.mark.parametrize("rows", ROWS)
def test_the_mass_of_blocks_is_their_keys_weights(rows, few, monkeypatch):
    monkeypatch.setattr("cat_lm.ops.landmark.teaching.FEW_BLOCKS", few)
    (documents, padding), local = ROWS[rows], 1
    query, key, _ = drawn(26)
    layout = sequence_blocks(26, BLOCK, documents, padding, query.device)
    mass = block_mass(query, key, layout, local, 0.3)
    expected = torch.zeros_like(mass)
    for row, slots in rows_of(documents, padding, 2, 26):
        starts = layout.starts.expand(2, -1)[row]
        numbers = layout.numbers.expand(2, -1)[row]
        for tokens in slots:
            for t, slot in enumerate(tokens):
                keys = key[row, :, tokens[: t + 1]].repeat_interleave(2, dim=0)
                weights = (query[row, :, slot, None] @ keys.mT * 0.3).softmax(dim=-1)[:, 0]
                for c in range(t // BLOCK):
                    place = (starts == tokens[c * BLOCK]) & (numbers == c)
                    sums = weights[:, c * BLOCK : (c + 1) * BLOCK].sum(dim=-1)
                    expected[row, :, slot, place] = sums[:, None]
    torch.testing.assert_close(mass, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", ["plain", "documents"])
def test_the_mass_of_blocks_needs_no_square_of_the_length(rows):
    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            if isinstance(made, Tensor):
                self.size = max(self.size, made.untyped_storage().nbytes() // made.itemsize)
            return made

    time = 4096
    documents = None if rows == "plain" else torch.arange(time)[None] // 1000
    query, key = torch.randn(1, 2, 3, 4), torch.randn(1, 2, time, 4)
    layout = sequence_blocks(time, BLOCK, documents, None, query.device)
    layout = layout.of_queries(torch.tensor([7, 2000, 4095]))
    with Largest() as largest:
        block_mass(query, key, layout, 1, 0.3)
    assert largest.size <= 2 * key.numel()


def test_no_token_changes_what_comes_before_it():
    """Exactly, at the ends of blocks too."""
    query, key, value = drawn(22)

    def attended(query, key, value):
        layout = sequence_blocks(22, BLOCK, None, None, query.device)
        marks = landmark_keys(key, block_weights("exponential", BLOCK), layout, True)
        selected = choose_blocks(query, marks, layout, Choice(1, 2))
        return backend("eager", query, key, value, selected, layout, 2)

    before = attended(query, key, value)
    for token in (3, 4, 11, 21):
        changed = [x.clone() for x in (query, key, value)]
        for x in changed:
            x[:, :, token] += 5
        after = attended(*changed)
        assert after[:, :, :token].equal(before[:, :, :token])
        assert not after[:, :, token].equal(before[:, :, token])


def test_where_padding_stands_between_tokens():
    mask = torch.tensor([[0, 1, 1, 0, 0], [1, 1, 0, 1, 1], [0, 0, 1, 1, 1]]).bool()
    assert interior_padding(mask, None).any(dim=1).tolist() == [False, True, False]
    documents = torch.tensor([[0, 0, 0, 1, 1]] * 3)
    assert not interior_padding(mask, documents).any()


@pytest.mark.parametrize("case", CHOICES)
def test_the_kernel_equals_loops_over_the_definition(case):
    """Of one query and of several after a cache, beside padding, and of padding itself."""
    choice, name = CHOICES[case]
    query, key, value = (x.float() for x in drawn(26, 4, 4 if case == "head" else 2))
    # As a cache has them: a part of a longer buffer, and more room than landmarks.
    key, value = (F.pad(x, (0, 0, 0, 6))[:, :, :26] for x in (key, value))
    for padding in (None, LEFT):
        layout = sequence_blocks(26, BLOCK, None, padding, query.device)
        marks = landmark_keys(key, block_weights(name, BLOCK), layout, name == "exponential")
        marks = F.pad(marks, (0, 0, 0, 2), value=torch.nan)
        wanted = naive(query, key, value, name, choice, None, padding)
        pads = torch.tensor([0] if padding is None else [0, 5])
        for past, time in ((25, 1), (20, 6), (0, 16)):
            new = slice(past, past + time)
            seen = (x[:, :, : past + time] for x in (key, value))
            call = (marks, past, pads, BLOCK, choice, SCALING)
            found = kernel.decode(query[:, :, new], *seen, *call)
            real = slice(None) if padding is None else padding[:, new]
            found_real, wanted_real = (
                x.transpose(1, 2)[real] for x in (found, wanted[:, :, new].float())
            )
            assert found.isfinite().all() and found_real.shape[0]
            if time == 1 and padding is None:
                one = (query[:, :, new], key, value, marks[:, :, :-2], past, 0, *call[3:])
                torch.testing.assert_close(attend_one(*one), found, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(found_real, wanted_real, rtol=1e-4, atol=1e-5)


def test_the_kernel_in_half_precision_and_on_equal_scores():
    query, key, value = (x.float() for x in drawn(24, 2, 2))
    marks, choice = torch.zeros(2, 2, 6, 8), Choice(2, 1)
    call = (marks, 23, torch.tensor([0]), BLOCK, choice, SCALING)
    found = kernel.decode(query[:, :, -1:], key, value, *call)
    seen = [*range(8), *range(20, 24)]  # the first two blocks, and its own; no other is read
    for x in (key, value):
        x[:, :, 8:20] = torch.nan
    wanted = F.scaled_dot_product_attention(
        query[:, :, -1:], key[:, :, seen], value[:, :, seen], scale=SCALING
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for dtype in (torch.bfloat16, torch.float16):
        half = [x.to(dtype) for x in (query[:, :, -1:], key, value, marks)]
        found = kernel.decode(*half, *call[1:])
        assert found.dtype == dtype
        expected = F.scaled_dot_product_attention(
            half[0].float(), *(x.float()[:, :, seen] for x in half[1:3]), scale=SCALING
        )
        torch.testing.assert_close(found, expected.to(dtype), rtol=1e-2, atol=1e-2)


def test_the_kernel_reads_nothing_that_is_not_there():
    query, key, value = (x.float() for x in drawn(24))
    marks, pad = torch.zeros(2, 2, 6, 8), torch.tensor([0])

    def call(query=query[:, :, -1:], key=key, value=value, marks=marks, past=23, local=2):
        choice = Choice(2, local)
        return kernel.decode(query, key, value, marks, past, pad, BLOCK, choice, SCALING)

    assert call().isfinite().all()
    for wrong in (
        {"past": 24},
        {"marks": marks[:, :, :3]},
        {"marks": marks[:1]},
        {"marks": marks.bfloat16()},
        {"value": value[:, :, :-1]},
        {"key": key[..., :4], "value": value[..., :4]},
        {"query": query[:, :3, -1:]},
        {"local": 0},
    ):
        with pytest.raises(ValueError, match="do not fit"):
            call(**wrong)
