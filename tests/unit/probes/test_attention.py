"""What `check_entry` finds in attention, and what is found before a model has it.

Ours passes the same checks, so that none refuses what is right; each wrong one is one that trained.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cat_lm.core.errors import UserError
from cat_lm.model import attention
from cat_lm.model.attention import Pattern, ScoreTransform, ValueTransform
from cat_lm.model.attention.modules.call import visible_keys
from cat_lm.model.attention.modules.scores import ScoreModule
from cat_lm.testing import check_entry
from tests.unit.tiny_models import GROUPED, VARIANTS, cat_model, random_ids

OURS = [
    {"attention": "softmax"},
    {"attention": "chunk", "attention_options": {"size": 2}},
    {"attention": "multi_token", "attn_implementation": "eager"},
    {"attention": "landmark", "attention_options": {"block": 2, "top_k": 1, "local": 1}},
    {
        "attention": "landmark",
        "attention_options": {"block": 2, "top_k": 1, "filter": "ssm", "filter_state": 4},
    },
    {"score_transform": "exponential_decay"},
    {"score_transform": "exponential_decay", "score_options": {"bound": 0.5, "spacing": "steep"}},
    {"value_transform": "smoothing", "value_options": {"width": 3}},
]
FAMILIES = {"gpt_neox": VARIANTS["head"], "llama": GROUPED | {"conv_type": "none"}}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("fields", OURS, ids=str)
def test_our_attention_passes(fields, implementation, family):
    model = cat_model(**FAMILIES[family] | {"attn_implementation": implementation} | fields)
    for entry in attention.chosen_entries(model.config).values():
        check_entry(entry, body=model.base_model)


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


class Open(Weighted):
    def visible(self, call, query, key):
        return 1.0


class Causal(Weighted):
    """Knows the triangle and no mask."""

    def visible(self, call, query, key):
        time, keys = query.shape[2], key.shape[2]
        return torch.ones(time, keys).tril(keys - time)


class Padded(Weighted):
    """Knows documents by their numbers, and no padding."""

    def visible(self, call, query, key):
        seen = Causal.visible(self, call, query, key)
        numbers = call.documents
        return seen if numbers is None else seen * (numbers[:, None] == numbers[..., None])[:, None]


class Forgetful(Weighted):
    def visible(self, call, query, key):
        newest = torch.arange(key.shape[2]) >= key.shape[2] - query.shape[2]
        return super().visible(call, query, key) * newest


class Turned(Weighted):
    def given(self, output):
        return output.transpose(1, 2), None


class Bare(Weighted):
    def given(self, output):
        return output


class Crossed(Weighted):
    def given(self, output):
        return output + output.flip(0), None


class Endless(Weighted):
    def given(self, output):
        return output / 0, None


class NoExtra(nn.Module):
    def forward(self, query, key, value, call):
        return call.attend(query, key, value)


def pattern(core, **facts):
    """A registered pattern `odd` with a module of this class."""

    class Odd(Pattern):
        name = title = "odd"
        implementations = ("eager", "sdpa")
        takes_transforms = False

        def build(self, config):
            return core()

    entry = type("Odd", (Odd,), facts)()
    attention.register(entry)
    return entry


WRONG_PATTERNS = {
    Open: "reads later tokens",
    Causal: "reads other documents",
    Padded: "reads padding",
    Forgetful: "gives other outputs in parts, with a state, than of the whole",
    Turned: "gives [2, 2, 7, 8]; must give [B, T, H, D], here [2, 7, 2, 8]",
    Bare: "gives a Tensor; must give ([B, T, H, D], maps or None)",
    Crossed: "reads other rows",
    Endless: "gives numbers that are not finite",
}


@pytest.mark.parametrize("core", WRONG_PATTERNS)
def test_a_wrong_pattern_is_found(core):
    with pytest.raises(AssertionError) as error:
        check_entry(pattern(core))
    assert str(error.value) == f"attention 'odd': its module {WRONG_PATTERNS[core]}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pattern_that_reads_later_tokens_makes_no_model(family):
    pattern(Open)
    for _ in range(2):  # what was wrong once is checked again
        with pytest.raises(UserError) as error:
            cat_model(**FAMILIES[family], attention="odd")
        assert str(error.value) == "attention 'odd': its module reads later tokens"


def test_a_right_pattern_is_checked_once():
    calls = []

    class Counted(Weighted):
        def given(self, output):
            calls.append(len(output))
            return super().given(output)

    pattern(Counted)
    for _ in range(2):
        cat_model(conv_type="none", attention="odd")
        assert len(calls) == 2  # the row, and its beginning


def test_a_pattern_may_refuse_what_it_cannot_do():
    class Whole(Weighted):
        def forward(self, query, key, value, extra, call):
            if call.continues or call.padding is not None:
                raise ValueError("whole rows alone")
            return super().forward(query, key, value, extra, call)

    check_entry(pattern(Whole, reads_positions=True))


def test_what_only_a_gpu_computes_is_not_checked():
    pattern(Open, computes_on_cpu=False)
    cat_model(conv_type="none", attention="odd")


@pytest.mark.parametrize(
    ("core", "said"),
    [
        (lambda: None, "build gives None; must return an nn.Module"),
        (SimpleNamespace, "build gives SimpleNamespace; must return an nn.Module"),
        (lambda: float("high"), "could not convert string to float: 'high'"),
        (NoExtra, "cannot compute 7 tokens: TypeError: NoExtra.forward() takes 5 positional arg"),
    ],
)
def test_what_raises_is_a_line_with_the_options(core, said):
    pattern(core, options={"bias": 4.0})
    with pytest.raises(UserError) as error:
        cat_model(conv_type="none", attention="odd", attention_options={"bias": "high"})
    assert str(error.value).startswith(
        f'attention \'odd\', attention_options={{"bias": "high"}}: {said}'
    )


def score(form, made):
    class Odd(ScoreTransform):
        name = title = "odd"

        def build(self, config, options):
            return made()

    entry = type("Odd", (Odd,), {"form": form})()
    attention.register(entry)
    return entry


def scores_of(score=None, factors=None):
    """A class of modules with these functions."""
    found = {"score": score, "factors": factors}
    return type("Scores", (ScoreModule,), {k: staticmethod(f) for k, f in found.items() if f})


def near(logits, query, key, head):
    return logits - (query - key)


def scaled(logits, query, key, head):
    return logits * 0.1 ** (query - key).clamp(min=0)


def unit(position, head):
    return torch.ones(()) * 2.0**-position, torch.ones(()) * 2.0**position


RIGHT_SCORES = {
    "a bias": ("additive", scores_of(near)),
    "nothing": ("additive", scores_of(lambda logits, *where: logits)),
    "a factor": ("elementwise", scores_of(scaled)),
    "two factors": ("separable", scores_of(factors=unit)),
    "factors and scores": (
        "separable",
        scores_of(lambda logits, i, j, head: logits * 2.0 ** (j - i), unit),
    ),
}
WRONG_SCORES = {
    "a factor": (
        "additive",
        scores_of(scaled),
        "makes other scores of logits than form='additive'",
    ),
    "other scores": (
        "separable",
        scores_of(scaled, unit),
        "makes other scores of logits than form",
    ),
    "no score": ("elementwise", scores_of(), "cannot compute 7 tokens: NotImplementedError"),
    "no factors": ("separable", scores_of(near), "cannot compute 7 tokens: NotImplementedError"),
    "a module": ("additive", nn.Identity, "cannot compute 7 tokens: AttributeError"),
    "a shape": (
        "additive",
        scores_of(lambda *given: near(*given)[0]),
        "makes scores [2, 7, 7] of logits [2, 2, 7, 7]",
    ),
}


@pytest.mark.parametrize("what", RIGHT_SCORES)
def test_scores_that_are_of_their_form(what):
    form, made = RIGHT_SCORES[what]
    check_entry(score(form, made))
    implementation = "eager" if form == "elementwise" else "sdpa"
    model = cat_model(conv_type="none", score_transform="odd", attn_implementation=implementation)
    model.generate(random_ids(1, 5), max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize("what", WRONG_SCORES)
def test_scores_that_are_not(what):
    """Of logits that are scaled `sdpa` took the bias, which was 0."""
    form, made, said = WRONG_SCORES[what]
    with pytest.raises(AssertionError) as error:
        check_entry(score(form, made))
    assert str(error.value).startswith("score_transform 'odd': ") and said in str(error.value)


def test_values_that_are_read_later():
    class Mean(nn.Module):
        def forward(self, value, context):
            return value + value.mean(dim=1, keepdim=True)

    class Odd(ValueTransform):
        name = title = "odd"

        def build(self, config, options):
            return Mean()

    attention.register(Odd())
    with pytest.raises(UserError, match="value_transform 'odd': its module reads later tokens"):
        cat_model(conv_type="none", value_transform="odd")


def test_a_pattern_of_other_lengths_is_not_checked():
    def length_problems(self, model, length):
        return [] if length % 16 == 0 else [f"of {length} tokens"]

    pattern(next(iter(WRONG_PATTERNS)), length_problems=length_problems)
    cat_model(attention="odd")
