"""How far one token goes in N-gram recall: read off the rows alone."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.mixers import Setting, make_mixer
from cat_lm.model.context import Context
from eval.lab.study import StudyOptions
from eval.recall.tasks import generate, make_task
from eval.studies import STUDIES
from tests.conftest import REPOSITORY


def queries(task, examples):
    """For each query: its tokens, its label, and the row's keys with their values."""
    n, width = task.ngram, task.ngram + 1
    for inputs, labels in zip(examples.inputs.tolist(), examples.labels.tolist(), strict=True):
        context = [inputs[i : i + width] for i in range(0, task.num_keys * width, width)]
        for t, label in enumerate(labels):
            if label != IGNORE_INDEX:
                yield inputs[t - n + 1 : t + 1], label, context


@pytest.mark.parametrize("unmatched", [0, 2])
@pytest.mark.parametrize("name", ["mqnar", "hard-mqnar"])
def test_groups_are_what_the_rows_show(name, unmatched):
    task = make_task(name, 48, {"vocab_size": "24", "unmatched": str(unmatched)})
    examples = generate(task, 200, seed=0, split="test")
    assert generate(task, 3, seed=0, split="train").groups == {}
    found = {key: [] for key in examples.groups}
    for gram, label, context in queries(task, examples):
        others = [c for c in context if c[1] == gram[-1] and c[:2] != gram]
        has = any(c[:2] == gram for c in context)
        kinds = {"shared": bool(others), "unshared": not others}
        kinds |= {"matched": has, "unmatched": not has} if unmatched else {}
        assert has == (label != 24) and (has or unmatched)
        for key in found:
            found[key].append(kinds[key])
    for key, group in examples.groups.items():
        assert group.shape == (200, task.queries) and group.ravel().tolist() == found[key], key
        assert 0 < group.mean() < 1


@pytest.mark.parametrize(
    "options", [{}, {"pool": "dense"}, {"pool": "6", "ngram": "3"}, {"unmatched": "6", "pool": "5"}]
)
def test_the_ceiling_is_that_of_the_best_reader_of_one_token(options):
    """By counting, for each number of keys with the token, which answer is right more often."""
    task = make_task("hard-mqnar", 64, {"vocab_size": "64", **options})
    examples = generate(task, 3000, seed=0, split="test")
    counts: dict[int, list[int]] = {}
    for gram, label, context in queries(task, examples):
        same = [c[-1] for c in context if c[-2] == gram[-1]]
        of = counts.setdefault(len(same), [0, 0, 0])
        of[0] += bool(same) and same[-1] == label
        of[1] += label == 64
        of[2] += 1
    best = sum(max(value, none) for value, none, _ in counts.values())
    total = sum(count for *_, count in counts.values())
    found = task.one_token(examples)
    assert found["one_token_ceiling"] == pytest.approx(best / total, abs=0.02)
    if task.unmatched == 0:
        assert found["one_token_expected"] == pytest.approx(found["one_token_ceiling"], abs=0.01)
    assert make_task("mqar", 16).one_token(examples) == {}


@pytest.mark.parametrize("layout", ["pairs", "free"])
@pytest.mark.parametrize("ngram", [2, 3])
def test_the_ceiling_of_one_query_is_that_of_a_reader_of_its_last_token(layout, ngram):
    """It takes one of the tokens that follow the same token, of pairs those after a key."""
    task = make_task("nar", 29, {"vocab_size": "24", "layout": layout, "ngram": str(ngram)})
    examples = generate(task, 4000, seed=0, split="test")
    right = shared = 0
    for inputs, labels in zip(examples.inputs.tolist(), examples.labels.tolist(), strict=True):
        places = range(ngram - 1, len(inputs) - ngram)
        if layout == "pairs":
            first = len(inputs) - ngram - task.num_keys * (ngram + 1)
            places = range(first + ngram - 1, len(inputs) - ngram, ngram + 1)
        following = [inputs[t + 1] for t in places if inputs[t] == inputs[-1]]
        right += max(following, key=following.count) == labels[-1]
        shared += len(following) > 1
    found = task.one_token(examples)["one_token_ceiling"]
    assert found == pytest.approx(right / 4000, abs=0.03) and 0.2 < found < 0.95
    groups = task.groups(examples.inputs, examples.labels)
    assert groups["shared"].sum() == shared and groups["shared"].shape == (4000, 1)
    assert (groups["shared"] != groups["unshared"]).all()


def test_the_closed_form_is_the_recorded_one():
    """Vocabulary 128: 63 tokens, (1 − (1 − p)^k)/(kp) nearly; bigrams of three tokens, by hand."""
    for length, keys in ((16, 2), (32, 5), (64, 10), (128, 21)):
        expected = make_task("mqnar", length, {"vocab_size": "128"}).one_token_expected
        about = (1 - (1 - 1 / 63) ** keys) / (keys / 63)
        assert expected == pytest.approx(about, abs=2e-3)
    task = make_task("hard-mqnar", 32, {"pool": "3"})
    assert task.one_token_expected == pytest.approx(3 / 5 * (1 - 6 / 126))
    page = (REPOSITORY / "eval/recall/tasks/README.md").read_text(encoding="utf-8")
    text = " ".join(page.split())
    told = re.search(r"one token alone is right in ([\d., and]+) at L = 64, 128 and 256", text)
    ceilings = (make_task("mqnar", 64 * n, {"keys": str(10 * n)}) for n in (1, 2, 4))
    assert re.findall(r"0\.\d+", told[1]) == [f"{x.one_token_expected:.3f}" for x in ceilings]


@pytest.mark.parametrize("scale", ["cpu", "paper"])
def test_one_token_does_not_suffice_in_the_figures(scale):
    tasks = {
        place.run.cell.make_task()
        for name in ("accuracy", "length")
        for place in STUDIES.get(name).places(StudyOptions(scale))
        if place.run.row == "hard MQNAR"
    }
    assert tasks and all(task.one_token_expected < 0.6 for task in tasks)
    for keys in range(5, 171):
        task = make_task("hard-mqnar", 6 * keys, {"pool": "dense"})
        assert task.num_keys == keys and task.one_token_expected < 0.6


def bigram_scores(layer: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """[4, 4]: how all bigrams of two tokens [2, 16], as queries, score them as keys, read where
    their value stands, after another token and before a third."""
    bigrams = list(itertools.product((0, 1), repeat=2))
    others = torch.ones(2, 16)
    rows = [
        torch.cat([others[:1], tokens[list(key)], others, tokens[list(asked)]])
        for asked in bigrams
        for key in bigrams
    ]
    q, k, _ = layer.streams(torch.stack(rows), Context())
    return (q[:, -1] * k[:, 3]).sum(dim=(1, 2)).view(4, 4)


def cat_of(conv_type: str) -> torch.nn.Module:
    return make_mixer(f"cat:conv_type={conv_type},bias=false").build(Setting(16)).eval()


@torch.no_grad()
def test_one_filter_a_head_does_not_rank_all_bigrams():
    """A key (u, v) scores F_2 G(u) + F_1 G(v), with one G for a query: (x, y) is above (x, x) and
    (y, y) only if F_1 and F_2 have different signs, (x, x) above (x, y) and (y, x) only if the
    same. With a filter a channel, u and v are matched each in half of them."""
    generator = torch.Generator().manual_seed(0)
    proportional = {"head": 0, "depthwise": 0}
    for conv_type, _ in itertools.product(proportional, range(20)):
        layer = cat_of(conv_type)
        own = layer.streams.convolution.filters()
        for filters in own.values():
            filters.normal_(generator=generator)
        scores = bigram_scores(layer, torch.randn(2, 16, generator=generator))
        same, last, first = scores[:, 0], scores[:, 1], scores[:, 2]  # (x, x), (x, y), (y, x)
        _, lag1, lag2 = own["k"].reshape(-1, 3)[0]
        alike = torch.allclose(lag1 * (same - first), lag2 * (same - last), rtol=1e-3, atol=1e-4)
        proportional[conv_type] += alike
        assert conv_type != "head" or scores.argmax(dim=1).tolist() != [0, 1, 2, 3]
    assert proportional == {"head": 20, "depthwise": 0}
    built = cat_of("depthwise")
    built.streams.projection.weight.copy_(torch.eye(16).repeat(3, 1))
    own = built.streams.convolution.filters()
    q, k = (own[name].zero_().view(2, 8, 3) for name in "qk")
    q[0, :, 0] = q[1, :, 1] = k[0, :, 1] = k[1, :, 2] = 1
    scores = bigram_scores(built, torch.eye(8)[:2].repeat(1, 2))
    assert scores.argmax(dim=1).tolist() == [0, 1, 2, 3]
