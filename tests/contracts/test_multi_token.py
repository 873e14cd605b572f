"""Contracts of multi-token attention: documents, earlier queries, padding between keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.contracts.operators import (
    assert_close,
    exact,
    identity_start,
    multi_token_attention,
    with_gradients,
)
from tests.reference import multi_token as reference

SCALING, HEADS = 0.6, 2


def draw(time: int, rows: int, window: tuple[int, int], mixing: tuple[bool, bool]) -> list:
    """Return queries, keys and values [B, H, T, 3], the kernel and the mixings or None."""
    torch.manual_seed(time)
    streams = [torch.randn(rows, HEADS, time, 3).double() for _ in range(3)]
    streams.append(torch.randn(HEADS, *window).double())
    streams += [torch.randn(HEADS, HEADS).double() if has else None for has in mixing]
    return [None if s is None else s.requires_grad_() for s in streams]


def attend(streams: list, documents: Tensor | None = None) -> Tensor:
    """Return [B, H, T, D] of whole rows."""
    rows, time = streams[0].shape[0], streams[0].shape[2]
    visible, positions = torch.ones(time, time).tril().bool(), torch.arange(time)[None]
    if documents is not None:
        visible = visible & (documents[:, :, None] == documents[:, None])
        positions = visible.sum(2) - 1
    visible = visible.view(-1, 1, time, time)
    y, maps = multi_token_attention(*streams, visible=visible, positions=positions, scaling=SCALING)
    assert maps.shape == (rows, HEADS, time, time)
    return y.transpose(1, 2)


@pytest.mark.parametrize("borders", [[9], [4, 5], [1, 6, 2]], ids=str)
@pytest.mark.parametrize(
    ("window", "mixing"),
    [
        ((3, 5), (True, True)),
        ((1, 1), (True, False)),
        ((4, 3), (False, True)),
        ((12, 1), (False,) * 2),
    ],
)
def test_attention_equals_reference_with_gradients(window, mixing, borders):
    streams = draw(9, 2, window, mixing)
    leaves = [s for s in streams if s is not None]
    ids = torch.repeat_interleave(torch.arange(len(borders)), torch.tensor(borders)).expand(2, -1)
    y = attend(streams, ids if len(borders) > 1 else None)
    same = iter(exact(leaves))
    same = [None if s is None else next(same) for s in streams]
    rows = []
    for row in range(2):
        parts = zip(*(s[row].split(borders, dim=1) for s in same[:3]), strict=True)
        rows.append(torch.cat([reference.attend(*p, *same[3:], SCALING) for p in parts], dim=1))
    wanted = with_gradients([torch.stack(rows)], [s for s in same if s is not None])
    assert_close(with_gradients([y], leaves), wanted, 1e-9)


@pytest.mark.parametrize("window", [(3, 5), (1, 3), (20, 1)])
def test_token_after_earlier_queries_equals_whole(window):
    streams = draw(8, 1, window, (True, True))
    whole = attend(streams)
    query, key, value, *others = streams
    for t in range(8):
        seen = window[0] - 1
        past = torch.zeros(1, HEADS, seen, 3).double()
        earlier = torch.cat([past, query[:, :, :t]], dim=2)[:, :, t:]
        visible = torch.ones(seen + 1, t + 1).tril(t - seen).bool().view(1, 1, seen + 1, t + 1)
        y, _ = multi_token_attention(
            torch.cat([earlier, query[:, :, t : t + 1]], dim=2),
            key[:, :, : t + 1],
            value[:, :, : t + 1],
            *others,
            visible=visible,
            positions=torch.tensor([[t]]),
            scaling=SCALING,
        )
        assert_close([y.transpose(1, 2)], [whole[:, :, t : t + 1]], 1e-9)


def test_start_changes_nothing_and_vmap_equals_loop():
    streams = draw(7, 2, (2, 3), (True, True))
    start = identity_start(HEADS, 2, 3, "both")
    plain = [*streams[:3], *(start[n].double() for n in ("kernel", "before", "after"))]
    dense = torch.nn.functional.scaled_dot_product_attention(
        *streams[:3], is_causal=True, scale=SCALING
    )
    assert_close([attend(plain)], [dense], 1e-9)
    kernels = torch.stack([streams[3].detach(), -streams[3].detach()])
    found = torch.vmap(lambda k: attend([*streams[:3], k, *streams[4:]]))(kernels)
    alone = [attend([*streams[:3], k, *streams[4:]]) for k in kernels]
    assert_close([found], [torch.stack(alone)], 1e-9)
