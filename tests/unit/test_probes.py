"""What a stranger's attention and mixers are tried for before a model has them.

Ours pass the same probes, so that none refuses what is right; each wrong one is one that trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cat_lm import mixers
from cat_lm.errors import UserError
from cat_lm.mixers import Mixer, MixerKind, Setting, make_mixer
from cat_lm.mixers import probe as mixer_probe
from cat_lm.model import attention
from cat_lm.model.attention import Pattern, ScoreTransform, ValueTransform, probe
from cat_lm.model.attention.call import visible_keys
from cat_lm.model.attention.scores import ScoreModule
from cat_lm.probing import Wrong, check_same, stir
from cat_lm.training.building import without_weights
from tests.unit.test_mixers import SPECIFICATIONS, WIDTH
from tests.unit.tiny_models import GROUPED, VARIANTS, cat_model, random_ids


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    """Forgets what was tried, and takes away what a test registers."""
    monkeypatch.setattr(probe, "_TRIED", set())
    monkeypatch.setattr(mixer_probe, "_TRIED", set())
    entries = {kind: dict(known) for kind, known in attention._ENTRIES.items()}
    monkeypatch.setattr(attention, "_ENTRIES", entries)
    monkeypatch.setattr(mixers, "_KINDS", dict(mixers._KINDS))


# Attention

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
def test_our_attention_passes(fields, implementation, family, monkeypatch):
    model = cat_model(**FAMILIES[family] | {"attn_implementation": implementation} | fields)
    monkeypatch.setattr(probe, "is_own", lambda entry: False)
    probe.try_entries(model.base_model)
    assert len(probe._TRIED) == len(attention.chosen_entries(model.config))


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

        def parameters(self, model):
            return 0

        def flops(self, model, context_length):
            return 0.0

        def build(self, config):
            return core()

    entry = type("Odd", (Odd,), facts)()
    attention.register(entry)
    return entry


WRONG_PATTERNS = {
    Open: "reads later tokens",
    Causal: "reads other documents",
    Padded: "reads padding",
    Forgetful: "gives other outputs in parts, with a cache, than of the whole row",
    Turned: "gives [2, 2, 7, 8]; must give [B, T, H, D], here [2, 7, 2, 8]",
    Bare: "gives a Tensor; must give ([B, T, H, D], maps or None)",
    Crossed: "reads other rows",
    Endless: "gives numbers that are not finite",
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("core", WRONG_PATTERNS)
def test_a_wrong_pattern_makes_no_model(core, family):
    pattern(core)
    for _ in range(2):  # what was wrong once is tried again
        with pytest.raises(UserError) as error:
            cat_model(**FAMILIES[family], attention="odd")
        assert str(error.value) == f"attention 'odd': its module {WRONG_PATTERNS[core]}"


def test_a_right_pattern_is_tried_once():
    calls = []

    class Counted(Weighted):
        def given(self, output):
            calls.append(len(output))
            return super().given(output)

    pattern(Counted)
    cat_model(conv_type="none", attention="odd")
    # The row; its beginning and its second half; documents and each alone; padded rows and each
    # alone; three parts; two after padding, and the row alone.
    assert len(calls) == 1 + 2 + 3 + 3 + 3 + 3
    cat_model(conv_type="none", attention="odd")
    assert len(calls) == 15


def test_a_pattern_may_refuse_what_it_cannot_do():
    class Whole(Weighted):
        def forward(self, query, key, value, extra, call):
            if call.continues or call.padding is not None:
                raise ValueError("whole rows alone")
            return super().forward(query, key, value, extra, call)

    pattern(Whole, reads_positions=True)
    cat_model(conv_type="none", attention="odd")


def test_what_only_a_gpu_computes_is_not_tried():
    pattern(Open, computes_on_cpu=False)
    cat_model(conv_type="none", attention="odd")


@pytest.mark.parametrize(
    ("core", "said"),
    [
        (lambda: None, "build gives None; must return an nn.Module"),
        (SimpleNamespace, "build gives SimpleNamespace; must return an nn.Module"),
        (lambda: float("high"), "could not convert string to float: 'high'"),
        (lambda: nowhere, "build raises NameError: name 'nowhere' is not defined (test_probes.py"),  # noqa: F821
        (NoExtra, "cannot attend to 7 tokens: TypeError: NoExtra.forward() takes 5 positional arg"),
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

    attention.register(type("Odd", (Odd,), {"form": form})())


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
    "no score": ("elementwise", scores_of(), "defines no score, by which form='elementwise' is"),
    "no factors": ("separable", scores_of(near), "defines no factors, by which form='separable'"),
    "a module": ("additive", nn.Identity, "is no ScoreModule"),
    "a shape": (
        "additive",
        scores_of(lambda *given: near(*given)[0]),
        "makes scores [2, 7, 7] of logits [2, 2, 7, 7]",
    ),
}


@pytest.mark.parametrize("what", RIGHT_SCORES)
def test_scores_that_are_of_their_form(what):
    form, made = RIGHT_SCORES[what]
    score(form, made)
    implementation = "eager" if form == "elementwise" else "sdpa"
    model = cat_model(conv_type="none", score_transform="odd", attn_implementation=implementation)
    model.generate(random_ids(1, 5), max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize("what", WRONG_SCORES)
def test_scores_that_are_not(what):
    """Of logits that are scaled `sdpa` took the bias, which was 0."""
    form, made, said = WRONG_SCORES[what]
    score(form, made)
    with pytest.raises(UserError) as error:
        cat_model(conv_type="none", score_transform="odd", attn_implementation="eager")
    assert str(error.value).startswith(f"score_transform 'odd': its module {said}")


def test_values_that_are_read_later():
    class Mean(nn.Module):
        def forward(self, value, padding_mask, document_ids, state):
            return value + value.mean(dim=1, keepdim=True)

    class Odd(ValueTransform):
        name = title = "odd"

        def build(self, config, options):
            return Mean()

    attention.register(Odd())
    with pytest.raises(UserError, match="value_transform 'odd': its module reads later tokens"):
        cat_model(conv_type="none", value_transform="odd")


# Mixers


@pytest.mark.parametrize("specification", SPECIFICATIONS)
def test_our_mixers_pass(specification):
    for layer in (0, 1):
        mixer_probe.try_mixer(make_mixer(specification), Setting(64, layer, 2))


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

    def forward(self, x, *, document_ids=None, padding_mask=None, state=None):
        if padding_mask is not None:
            x = x * padding_mask[..., None]
        y = self.mixed(x)
        if document_ids is not None:
            y = self.apart(x, y, document_ids)
        if state is not None:
            y = y + (self.taken(state["sum"]) if state else 0)
            state["sum"] = self.kept(y[:, -1:], padding_mask)
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
    def forward(self, x, *, document_ids=None, padding_mask=None, state=None):
        return super().forward(x, document_ids=document_ids, state=state)


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
    Packed: "its module supports documents, and reads other documents",
    Padding: "its module supports padding, and reads it",
    Lost: "its module supports state, and gives other outputs in parts than of the whole",
    Columns: "its module supports state, and holds 'sum' that is no tensor with rows first",
    AfterPadding: "its module supports padding and state, and goes on otherwise after padding",
    Broken: "cannot mix 7 tokens: RuntimeError: shape '[3, 5]' is invalid for input of size 224 "
    "(test_probes.py",
    lambda width: None: "build gives None; must return an nn.Module",
}


def kind(module, **facts):
    class Odd(MixerKind):
        name = "odd"
        supports = frozenset(mixers.CAPABILITIES)

        def build(self, options, setting):
            return module(setting.d_model)

        def mixing_flops(self, options, setting, length):
            return 0.0

        def saved_tensors(self, options, setting):
            return 1.0

        def state_numbers(self, options, setting, length):
            return setting.d_model

    return type("Odd", (Odd,), {"Options": Options} | facts)()


@pytest.mark.parametrize("module", WRONG_MIXERS, ids=lambda module: module.__name__)
def test_a_wrong_mixer_is_not_built(module):
    for _ in range(2):
        with pytest.raises(UserError) as error:
            Mixer(kind(module), Options("x")).build(Setting(WIDTH))
        assert str(error.value).startswith(f"mixer odd:note=x: {WRONG_MIXERS[module]}")


def test_what_a_mixer_does_not_support_is_not_tried():
    for module in (Packed, Padding, Lost):
        Mixer(kind(module, supports=frozenset()), Options()).build(Setting(WIDTH))
    Mixer(kind(Later, computes_on_cpu=False), Options()).build(Setting(WIDTH))
    Mixer(kind(Later, longest=4), Options()).build(Setting(WIDTH))


def test_a_mixer_may_be_for_wide_models_alone():
    class Wide(Sum):
        def __init__(self, width):
            super().__init__(width)
            assert width >= 96

    Mixer(kind(Wide), Options()).build(Setting(96))


@pytest.mark.parametrize("count", ["saved_tensors", "mixing_flops", "state_numbers"])
def test_counts_of_a_mixer_are_numbers(count):
    for given, said in (
        (lambda *_: None, f"{count} gives None; must be a number"),
        (lambda *_: float("nan"), f"{count} gives nan; must be a number"),
        (lambda self: 1.0, f"{count} cannot count: TypeError: "),
    ):
        given.__name__ = count
        with pytest.raises(UserError) as error:
            Mixer(kind(Sum, **{count: given}), Options()).check(Setting(WIDTH))
        assert str(error.value).startswith(f"mixer odd: {said}")


# What surrounds the model


def surroundings():
    from transformers.initialization import no_init_weights

    return {"meta": torch.device("meta"), "no_init": no_init_weights(), "other": without_weights()}


@pytest.mark.parametrize("around", ["meta", "no_init", "other"])
def test_a_model_without_values_is_tried_with_some(around):
    pattern(Open)
    with pytest.raises(UserError, match="reads later tokens"), surroundings()[around]:
        cat_model(conv_type="none", attention="odd")
    with pytest.raises(UserError, match="reads later tokens"), surroundings()[around]:
        Mixer(kind(Later), Options()).build(Setting(WIDTH))
    with surroundings()[around]:
        Mixer(kind(Sum), Options()).build(Setting(WIDTH))


def test_half_precision_around_it():
    seen = set()

    class Seen(Sum):
        def mixed(self, x):
            seen.update((x.dtype, self.out_proj.weight.dtype))
            return super().mixed(x)

    torch.set_default_dtype(torch.bfloat16)
    try:
        module = Mixer(kind(Seen), Options()).build(Setting(WIDTH))
    finally:
        torch.set_default_dtype(torch.float32)
    assert seen == {torch.float32} and module.out_proj.weight.dtype == torch.bfloat16


def test_weights_are_drawn_as_if_nothing_had_been_tried():
    pattern(Weighted)
    odd = kind(Sum)
    for make in (
        lambda: cat_model(conv_type="none", attention="odd"),
        lambda: Mixer(odd, Options()).build(Setting(WIDTH)),
    ):
        drawn = []
        for _ in range(2):  # tried, and not
            torch.manual_seed(3)
            model = make()
            drawn.append([*model.parameters(), torch.rand(3)])
        assert all(torch.equal(one, other) for one, other in zip(*drawn, strict=True))


def test_a_bias_that_masks_is_no_wrong_form():
    """Of -inf in both there is no difference, and of one alone there is."""
    wanted = torch.tensor([0.5, -torch.inf])
    check_same(wanted.clone(), wanted, "other")
    for other in ([0.5, 1.0], [0.6, -torch.inf], [0.5, torch.nan]):
        with pytest.raises(Wrong, match="other"):
            check_same(torch.tensor(other), wanted, "other")


def test_what_is_no_number_to_learn_is_left_as_it_is():
    module = nn.Module()
    module.rows = nn.Parameter(torch.arange(3), requires_grad=False)
    module.mask = nn.Parameter(torch.tensor([0.0, -torch.inf]), requires_grad=False)
    module.gain = nn.Parameter(torch.ones(2))
    with torch.no_grad():
        stir(module)
    assert module.rows.tolist() == [0, 1, 2] and module.mask[0] == 0
    assert not (module.gain == 1).any()


def test_a_pattern_of_other_lengths_is_not_tried():
    def length_problems(self, model, length):
        return [] if length % 16 == 0 else [f"of {length} tokens"]

    pattern(next(iter(WRONG_PATTERNS)), length_problems=length_problems)
    cat_model(attention="odd")
