"""What `check_entry` finds in a mixer, and what is found before a layer has it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from cat_lm import mixers
from cat_lm.core.errors import UserError
from cat_lm.mixers import Mixer, MixerKind, Setting
from cat_lm.testing import check_entry
from tests.unit.test_mixers import WIDTH


@dataclass(frozen=True)
class Options:
    """None of them changes anything."""

    note: str = "none"


class Sum(nn.Module):
    """The sum of all tokens so far; all that a mixer can do."""

    def __init__(self, width):
        super().__init__()
        self.out_proj = nn.Linear(width, width)
        nn.init.zeros_(self.out_proj.weight)  # which hides everything, if it stays

    def forward(self, x, context):
        x = context.without_padding(x)
        y, state = self.mixed(x), context.state
        if context.documents is not None:
            y = self.apart(x, y, context.documents)
        if state is not None:
            y = y + self.taken(state.recurrent["sum"]) if state.recurrent else y
            state.replace_recurrent("sum", self.kept(y[:, -1:], context.padding))
        return self.given(self.out_proj(y))

    def given(self, y):
        return y

    def mixed(self, x):
        return x.cumsum(dim=1)

    def taken(self, held):
        return held

    def kept(self, held, padding_mask):
        return held

    def apart(self, x, y, document_ids):
        same = document_ids[:, None] == document_ids[..., None]
        return (same.tril().to(x.dtype)) @ x


class Later(Sum):
    def mixed(self, x):
        return x.cumsum(dim=1).flip(1)


class Thin(Sum):
    def given(self, y):
        return y[..., :1]


class Short(Sum):
    def given(self, y):
        return y[:, 1:]


class Pair(Sum):
    def given(self, y):
        return y, None


class OtherRows(Sum):
    def mixed(self, x):
        return x.cumsum(dim=1).cumsum(dim=0)


class Packed(Sum):
    def apart(self, x, y, document_ids):
        return y


class Padding(Sum):
    def forward(self, x, context):
        return super().forward(x, replace(context, padding=None))


class Lost(Sum):
    def kept(self, held, padding_mask):
        return 0 * held


class Columns(Sum):
    def kept(self, held, padding_mask):
        return held.transpose(0, 1)

    def taken(self, held):
        return held.transpose(0, 1)


class AfterPadding(Sum):
    """Counts padding among what a state has seen."""

    def kept(self, held, padding_mask):
        return held if padding_mask is None else held + (~padding_mask).sum()


class Broken(Sum):
    def mixed(self, x):
        return x.view(3, 5)


WRONG_MIXERS = {
    Later: "its module reads later tokens",
    Thin: "its module gives [2, 7, 1]; must give [B, T, C], here [2, 7, 16]",
    Short: "its module gives [2, 6, 16]; must give [B, T, C], here [2, 7, 16]",
    Pair: "its module gives a tuple; must give a tensor [B, T, C]",
    OtherRows: "its module reads other rows",
    Packed: "its module reads other documents",
    Padding: "its module reads padding",
    Lost: "its module gives other outputs in parts, with a state, than of the whole",
    Columns: "its module holds 'sum' that is no tensor with rows first",
    AfterPadding: "its module goes on otherwise after padding",
    Broken: "cannot compute 7 tokens: RuntimeError: shape '[3, 5]' is invalid for input of size "
    "224 (test_mixers.py",
}


def kind(module, **facts):
    class Odd(MixerKind):
        name = "odd"
        supports = frozenset(mixers.CAPABILITIES)

        def build(self, options, setting):
            return module(setting.d_model)

    return type("Odd", (Odd,), {"Options": Options} | facts)()


@pytest.mark.parametrize("module", WRONG_MIXERS, ids=lambda module: module.__name__)
def test_a_wrong_mixer_is_found(module):
    with pytest.raises(AssertionError) as error:
        check_entry(kind(module), {"note": "x"}, width=WIDTH)
    assert str(error.value).startswith(f"mixer odd:note=x: {WRONG_MIXERS[module]}")


def test_what_a_mixer_does_not_support_is_not_checked():
    for module in (Packed, Padding, Lost):
        check_entry(kind(module, supports=frozenset()))


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Later, "its module reads later tokens"),
        (Broken, WRONG_MIXERS[Broken]),
    ],
)
def test_a_mixer_that_reads_later_tokens_is_not_built(module, said):
    for _ in range(2):
        with pytest.raises(UserError) as error:
            Mixer(kind(module), Options("x")).build(Setting(WIDTH))
        assert str(error.value).startswith(f"mixer odd:note=x: {said}")


def test_what_no_cpu_computes_is_built_without_a_check():
    Mixer(kind(Later, computes_on_cpu=False), Options()).build(Setting(WIDTH))


@pytest.mark.parametrize("held", [torch.ones(2, dtype=torch.complex64), torch.tensor(-torch.inf)])
def test_buffers_must_fit_into_a_checkpoint(held):
    class Holding(Sum):
        def __init__(self, width):
            super().__init__(width)
            self.register_buffer("mask", held)

    with pytest.raises(AssertionError, match=r"mixer odd: holds a buffer mask .* no checkpoint"):
        check_entry(kind(Holding))
