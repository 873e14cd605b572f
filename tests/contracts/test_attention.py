"""Contracts of the registry of attention: patterns, transforms of scores and of values."""

from __future__ import annotations

import copy

import pytest
import torch

from cat_lm import architectures
from cat_lm.core.errors import UserError
from cat_lm.model import attention
from cat_lm.model.attention import Pattern, ScoreTransform, ValueTransform
from cat_lm.testing import check_entry
from tests.contracts.models import BY, PATTERNS, SCORES, SHAPE, SIZES, VALUES, tokens
from tests.reference.attention import convolve

# Each entry with its options, by the fields that choose it.
ENTRIES = {
    name: (kind, fields)
    for kind, known in ((Pattern, PATTERNS), (ScoreTransform, SCORES), (ValueTransform, VALUES))
    for name, fields in known.items()
    if fields
}
each_entry = pytest.mark.parametrize("name", ENTRIES)
FAMILIES = {"gpt_neox": {"rotary_pct": 1.0}, "llama": {"num_key_value_heads": 2}}


def config_of(name: str, family: str = "gpt_neox", **changes):
    fields = SIZES | SHAPE | {"conv_type": "none"} | FAMILIES[family] | ENTRIES[name][1] | changes
    return architectures.get(family).config_class()(**copy.deepcopy(fields))


def entry_of(name: str):
    """Return the entry and its options."""
    kind, fields = ENTRIES[name]
    config = config_of(name, attn_implementation="eager")
    return attention.chosen_entries(config)[kind], next(
        (options for key, options in fields.items() if key.endswith("options")), None
    )


@pytest.mark.parametrize("family", FAMILIES)
@each_entry
def test_entry_does_what_it_says_of_itself(name, family):
    """Alone, in the family's own block, by eager and by sdpa."""
    entry, options = entry_of(name)
    for by in ("eager", "sdpa"):
        if by in (entry.implementations or BY):
            body = architectures.get(family).classes().base_model
            config = config_of(name, family, attn_implementation=by)
            check_entry(entry, options, body=body(config).eval())
    check_entry(entry, options)


@each_entry
def test_implementations_that_cannot_compute_it_are_refused(name):
    entry, _ = entry_of(name)
    kinds = architectures.get("gpt_neox").classes()
    for by in BY:
        if by in (entry.implementations or BY):
            assert attention.implementation_problems(config_of(name), by) == []
            continue
        said = f"attn_implementation={by}: cannot compute .*; use one of"
        with pytest.raises(ValueError, match=said):
            kinds.causal_lm(config_of(name, attn_implementation=by))
        model = kinds.causal_lm(config_of(name, attn_implementation="eager"))
        model.set_attn_implementation(by)
        with pytest.raises(ValueError, match=said):
            model(tokens(1, 9))


@each_entry
def test_parameters_start_as_it_says(name):
    """Nothing drawn may stand in its place, whichever seed there is."""
    family = architectures.get("gpt_neox")
    states = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = config_of(name, attn_implementation="eager")
        state = family.classes().causal_lm(config).state_dict()
        states.append({n: w for n, w in state.items() if ".core." in n or "transform" in n})
    assert all(torch.equal(w, states[1][n]) for n, w in states[0].items())


@each_entry
def test_unknown_options_are_one_line(name):
    kind, _ = ENTRIES[name]
    key, options_key = kind.key, kind.options_key
    with pytest.raises((ValueError, UserError), match=f"{options_key}.wings: unknown") as raised:
        config_of(name, **{options_key: {"wings": 2}})
    assert "\n" not in str(raised.value)
    with pytest.raises((ValueError, UserError), match=f"{key}=.*must be one of"):
        config_of(name, **{key: "wings", options_key: None})


@each_entry
def test_training_goes_on_only_with_what_it_was_learned_with(name):
    family = architectures.get("gpt_neox")
    entry, _ = entry_of(name)
    fields = SIZES | SHAPE | {"conv_type": "none"} | FAMILIES["gpt_neox"]
    plain = family.config_class()(**fields)
    theirs, ours = (family.section_values(config) for config in (plain, config_of(name)))
    assert family.differences(ours, ours) == []
    is_other = ENTRIES[name][1].get("attention") != "softmax"
    assert bool(family.differences(theirs, ours)) == (is_other and not entry.takes_any_weights)


def test_filters_of_queries_and_keys_are_a_kernel_of_scores():
    """(f * q)_i · (g * k)_j = Σ_ab f[a] g[b] S[i−a, j−b], by which ranks add up to any kernel."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 9, 1, 4, dtype=torch.float64)
    f, g = torch.randn(2, 1, 3, dtype=torch.float64)
    scores = q[:, 0] @ k[:, 0].T
    found = convolve("head", q, f)[:, 0] @ convolve("head", k, g)[:, 0].T
    for i in range(9):
        for j in range(9):
            lags = [(a, b) for a in range(min(3, i + 1)) for b in range(min(3, j + 1))]
            expected = sum(f[0, a] * g[0, b] * scores[i - a, j - b] for a, b in lags)
            torch.testing.assert_close(found[i, j], expected)
