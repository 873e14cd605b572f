"""What `check_entry` finds in attention and in mixers, and what is found before a model is made.

The contracts of attention and of mixers show that every entry of the project passes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.initialization import no_init_weights

from cat_lm import architectures, mixers
from cat_lm.core import causality
from cat_lm.core.causality import is_same, perturb_parameters
from cat_lm.core.errors import UserError
from cat_lm.mixers import Mixer, MixerKind, Setting
from cat_lm.model import attention
from cat_lm.model.attention import Pattern, ScoreTransform, ValueTransform
from cat_lm.model.attention.modules.call import visible_keys
from cat_lm.model.attention.modules.scores import ScoreModule
from cat_lm.ops.convolution import kinds
from cat_lm.testing import check_entry
from tests.tiny_models import cat_model

WIDTH = 16


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    """Forget what was checked, and take away what a test registers."""
    monkeypatch.setattr(causality, "_CHECKED", set())
    for registry in (*attention.REGISTRIES.values(), mixers.MIXERS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


# Attention


class Weighted(nn.Module):
    """The mean of the values of visible keys, weighed by their scores."""

    def forward(self, query, key, value, extra, call):
        groups = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
        scores = (query @ key.mT).sigmoid() * self.visible(call, query, key)
        weights = scores / scores.sum(dim=-1, keepdim=True).clamp(min=1e-6)
        return self.given((weights @ value).transpose(1, 2))

    def visible(self, call, query, key):
        seen = visible_keys(call.mask, query, key)
        return 1.0 if seen is None else seen

    def given(self, output):
        return output, None


def triangle(self, call, query, key):
    time, keys = query.shape[2], key.shape[2]
    return torch.ones(time, keys).tril(keys - time)


def triangle_of_documents(self, call, query, key):
    numbers = call.documents
    same = 1.0 if numbers is None else (numbers[:, None] == numbers[..., None])[:, None]
    return triangle(self, call, query, key) * same


def newest(self, call, query, key):
    seen = torch.arange(key.shape[2]) >= key.shape[2] - query.shape[2]
    return Weighted.visible(self, call, query, key) * seen


WRONG_PATTERNS = {
    "reads later tokens": {"visible": lambda self, *given: 1.0},
    "reads other documents": {"visible": triangle},
    "reads padding": {"visible": triangle_of_documents},
    "gives other outputs in parts, with a state, than of the whole": {"visible": newest},
    "gives [2, 2, 7, 8]; must give [B, T, H, D], here [2, 7, 2, 8]": {
        "given": lambda self, output: (output.transpose(1, 2), None)
    },
    "gives a Tensor; must give ([B, T, H, D], maps or None)": {"given": lambda self, y: y},
    "reads other rows": {"given": lambda self, y: (y + y.flip(0), None)},
    "gives numbers that are not finite": {"given": lambda self, y: (y / 0, None)},
}


def pattern(changes: dict[str, Any], **facts) -> Pattern:
    """Return a registered pattern `odd` whose module is `Weighted` with other methods."""
    odd = {"name": "odd", "title": "odd", "implementations": ("eager", "sdpa")} | facts
    odd |= {"takes_transforms": False, "build": lambda self, config: core()}
    core = type("Core", (Weighted,), changes)
    entry = type("Odd", (Pattern,), odd)()
    attention.register(entry)
    return entry


@pytest.mark.parametrize("said", WRONG_PATTERNS)
def test_wrong_pattern_is_found(said):
    with pytest.raises(AssertionError) as error:
        check_entry(pattern(WRONG_PATTERNS[said]))
    assert str(error.value) == f"attention 'odd': its module {said}"


def test_pattern_may_refuse_what_it_cannot_do():
    def forward(self, query, key, value, extra, call):
        if call.continues or call.padding is not None:
            raise ValueError("whole rows alone")
        return Weighted.forward(self, query, key, value, extra, call)

    check_entry(pattern({"forward": forward}, reads_positions=True))


def near(logits, query, key, head):
    return logits - (query - key)


def scaled(logits, query, key, head):
    return logits * 0.1 ** (query - key).clamp(min=0)


def unit(position, head):
    return torch.ones(()) * 2.0**-position, torch.ones(()) * 2.0**position


# What is wrong with scores of a form that are computed by `score`, or by `factors`.
SCORES = {
    "a bias": ("additive", {"score": near}, ""),
    "a factor of each pair": ("elementwise", {"score": scaled}, ""),
    "two factors": ("separable", {"factors": unit}, ""),
    "no sum": ("additive", {"score": scaled}, "makes other scores of logits than form='additive'"),
    "other factors": ("separable", {"score": scaled, "factors": unit}, "makes other scores of"),
    "no score": ("elementwise", {}, "cannot compute 7 tokens: NotImplementedError"),
    "no factors": ("separable", {"score": near}, "cannot compute 7 tokens: NotImplementedError"),
    "a shape": (
        "additive",
        {"score": lambda *given: near(*given)[0]},
        "makes scores [2, 7, 7] of logits [2, 2, 7, 7]",
    ),
}


@pytest.mark.parametrize("what", SCORES)
def test_scores_must_be_of_their_form(what):
    form, functions, said = SCORES[what]
    methods = {name: staticmethod(function) for name, function in functions.items()}
    made = type("Scores", (ScoreModule,), methods)
    odd = {"name": "odd", "title": "odd", "form": form, "build": lambda self, *given: made()}
    entry = type("Odd", (ScoreTransform,), odd)()
    attention.register(entry)
    if not said:
        check_entry(entry)
        return
    with pytest.raises(AssertionError) as error:
        check_entry(entry)
    assert str(error.value).startswith("score_transform 'odd': ") and said in str(error.value)


# Mixers


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
        context = self.known(context)
        x = context.without_padding(x)
        y, state = self.mixed(x), context.state
        if context.documents is not None:
            y = self.apart(x, y, context.documents)
        if state is not None:
            y = y + self.taken(state.recurrent["sum"]) if state.recurrent else y
            state.replace_recurrent("sum", self.kept(y[:, -1:], context.padding))
        return self.given(self.out_proj(y))

    def known(self, context):
        return context

    def given(self, y):
        return y

    def mixed(self, x):
        return x.cumsum(dim=1)

    def taken(self, held):
        return held

    def kept(self, held, padding):
        return held

    def apart(self, x, y, documents):
        same = documents[:, None] == documents[..., None]
        return (same.tril().to(x.dtype)) @ x


def later(self, x):
    return x.cumsum(dim=1).flip(1)


WRONG_MIXERS = {
    "its module reads later tokens": {"mixed": later},
    "its module gives [2, 7, 1]; must give [B, T, C], here [2, 7, 16]": {
        "given": lambda self, y: y[..., :1]
    },
    "its module gives a tuple; must give a tensor [B, T, C]": {"given": lambda self, y: (y, None)},
    "its module reads other rows": {"mixed": lambda self, x: x.cumsum(dim=1).cumsum(dim=0)},
    "its module reads other documents": {"apart": lambda self, x, y, documents: y},
    "its module reads padding": {"known": lambda self, context: replace(context, padding=None)},
    "its module gives other outputs in parts, with a state, than of the whole": {
        "kept": lambda self, held, padding: 0 * held
    },
    "its module holds 'sum' that is no tensor with rows first": {
        "kept": lambda self, held, padding: held.transpose(0, 1),
        "taken": lambda self, held: held.transpose(0, 1),
    },
    "its module goes on otherwise after padding": {
        "kept": lambda self, held, padding: held if padding is None else held + (~padding).sum()
    },
    "cannot compute 7 tokens: RuntimeError: shape '[3, 5]' is invalid": {
        "mixed": lambda self, x: x.view(3, 5)
    },
}


def mixer(changes: dict[str, Any] | None = None, **facts) -> MixerKind:
    """Return a kind `odd` whose module is `Sum` with other methods."""
    module = type("Odd", (Sum,), changes or {})
    facts = {"supports": frozenset(mixers.CAPABILITIES), "Options": Options, "name": "odd"} | facts
    facts["build"] = lambda self, options, setting: module(setting.d_model)
    return type("OddKind", (MixerKind,), facts)()


@pytest.mark.parametrize("said", WRONG_MIXERS)
def test_wrong_mixer_is_found(said):
    with pytest.raises(AssertionError) as error:
        check_entry(mixer(WRONG_MIXERS[said]), {"note": "x"}, width=WIDTH)
    assert str(error.value).startswith(f"mixer odd:note=x: {said}")


@pytest.mark.parametrize("what", ["documents", "padding", "parts"])
def test_mixer_is_not_asked_for_what_it_does_not_support(what):
    (said,) = (said for said in WRONG_MIXERS if what in said and "after" not in said)
    check_entry(mixer(WRONG_MIXERS[said], supports=frozenset()))


@pytest.mark.parametrize("held", [torch.ones(2, dtype=torch.complex64), torch.tensor(-torch.inf)])
def test_buffers_must_fit_into_a_checkpoint(held):
    def build(self, width):
        Sum.__init__(self, width)
        self.register_buffer("mask", held)

    with pytest.raises(AssertionError, match=r"mixer odd: holds a buffer mask .* no checkpoint"):
        check_entry(mixer({"__init__": build}))


# Families and convolutions


@pytest.mark.parametrize("name", architectures.ARCHITECTURES.own_names())
def test_families_of_the_project_pass(name):
    family = architectures.get(name)
    usual = {"num_attention_heads": 4, "num_heads": 4, "mixer": "gla"}
    own = family.Section.model_fields
    keys = {k: v for k, v in usual.items() if k in own and own[k].is_required()}
    keys |= {"gpt_neox": {"rotary_pct": 1.0}, "mamba2": {"head_dim": 8}}.get(name, {})
    check_entry(family, keys, width=WIDTH)


@pytest.mark.parametrize("name", kinds.names())
def test_convolutions_of_the_project_pass(name):
    check_entry(kinds.get(name))


def test_wrong_convolution_is_found():
    wrong = kinds.Kind("odd", ("H", "W"), lambda taps, lag, x: taps[:, lag, None] * x.flip(1), "")
    with pytest.raises(AssertionError, match=r"conv_type .odd.: .*reads other tokens"):
        check_entry(wrong)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_weight": "model.{layer}.odd"}, "layer_weight names model.1.odd, which its model"),
        ({"model_type": "odd"}, "its configuration's model_type is 'cat_llama'"),
    ],
)
def test_wrong_family_is_found(changes, said):
    family = type(architectures.get("llama"))
    odd = type("Odd", (family,), changes)()
    with pytest.raises(AssertionError, match=f"architecture 'llama': {said}"):
        check_entry(odd, {"num_attention_heads": 4}, width=WIDTH)


# Before a model


def test_values_that_read_later_tokens_make_no_model():
    class Mean(nn.Module):
        def forward(self, value, context):
            return value + value.mean(dim=1, keepdim=True)

    odd = {"name": "odd", "title": "odd", "build": lambda self, *given: Mean()}
    attention.register(type("Odd", (ValueTransform,), odd)())
    with pytest.raises(UserError, match="value_transform 'odd': its module reads later tokens"):
        cat_model(conv_type="none", value_transform="odd")


@pytest.mark.parametrize("around", [torch.device("cpu"), torch.device("meta"), None])
def test_entry_that_reads_later_tokens_makes_no_model(around):
    """Also where a model gets no values: on the meta device, and when weights are read."""
    pattern(WRONG_PATTERNS["reads later tokens"])
    wrong = Mixer(mixer({"mixed": later}), Options("x"))
    for _ in range(2):  # What was wrong once is checked again.
        with pytest.raises(UserError) as error, around or no_init_weights():
            cat_model(family="llama", conv_type="none", attention="odd")
        assert str(error.value) == "attention 'odd': its module reads later tokens"
        with pytest.raises(UserError) as error, around or no_init_weights():
            wrong.build(Setting(WIDTH))
        assert str(error.value) == "mixer odd:note=x: its module reads later tokens"
    with around or no_init_weights():
        Mixer(mixer(), Options()).build(Setting(WIDTH))


def test_entry_that_no_cpu_computes_is_not_checked():
    pattern(WRONG_PATTERNS["reads later tokens"], computes_on_cpu=False)
    cat_model(conv_type="none", attention="odd")
    kind = mixer({"mixed": later}, computes_on_cpu=False)
    Mixer(kind, Options()).build(Setting(WIDTH))


def test_entry_is_checked_once_and_draws_nothing():
    calls = []

    def counted(self, output):
        calls.append(len(output))
        return output, None

    pattern({"given": counted})
    right = mixer()
    for make in (
        lambda: cat_model(conv_type="none", attention="odd"),
        lambda: Mixer(right, Options()).build(Setting(WIDTH)),
    ):
        drawn = []
        for _ in range(2):
            torch.manual_seed(3)
            drawn.append([*make().parameters(), torch.rand(3)])
        assert all(torch.equal(one, other) for one, other in zip(*drawn, strict=True))
    assert len(calls) == 2  # of the row, and of its beginning


def test_entry_is_checked_in_fp32():
    seen = set()

    def mixed(self, x):
        seen.update((x.dtype, self.out_proj.weight.dtype))
        return x.cumsum(dim=1)

    torch.set_default_dtype(torch.bfloat16)
    try:
        module = Mixer(mixer({"mixed": mixed}), Options()).build(Setting(WIDTH))
    finally:
        torch.set_default_dtype(torch.float32)
    assert seen == {torch.float32} and module.out_proj.weight.dtype == torch.bfloat16


def test_masks_and_indices_are_compared_and_left_as_they_are():
    wanted = torch.tensor([0.5, -torch.inf])
    assert is_same(wanted.clone(), wanted)
    for other in ([0.5, 1.0], [0.6, -torch.inf], [0.5, torch.nan]):
        assert not is_same(torch.tensor(other), wanted)
    module = nn.Module()
    module.rows = nn.Parameter(torch.arange(3), requires_grad=False)
    module.mask = nn.Parameter(torch.tensor([0.0, -torch.inf]), requires_grad=False)
    module.gain = nn.Parameter(torch.ones(2))
    with torch.no_grad():
        perturb_parameters(module)
    assert module.rows.tolist() == [0, 1, 2] and module.mask[0] == 0
    assert not (module.gain == 1).any()
