"""Budgets, mixtures, repetitions and named sets: which documents the result has, to the token."""

import json
from collections import Counter
from fractions import Fraction

import pytest

from cat_lm.core.errors import UserError
from cat_lm.data.opening import open_corpus
from data_prep.assemble import selection
from data_prep.encode import plan
from data_prep.encode.encoding import hash_place
from tests.data_prep.helpers import SETS, manifest_of, texts_of, write_sets
from tests.data_prep.helpers import set_flags as flags
from tests.prepared_data import digests


def input_documents(folder):
    """(set, text) of every training document in the order of the input."""
    for file in sorted(folder.glob("train/*/*.jsonl")):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            yield record["meta"].get("redpajama_set_name", "unknown"), record["text"]


def size(text):
    return len(text.encode()) + 1


def lowest(documents, tokens, seed=0):
    """The texts with the lowest hash places that reach so many tokens."""
    chosen, total = [], 0
    for text in sorted(documents, key=lambda text: hash_place(text.encode(), seed)):
        if total >= tokens:
            break
        chosen.append(text)
        total += size(text)
    return Counter(chosen)


@pytest.mark.parametrize(("budget", "bits"), [(1, 16), (10_000, 16), (60_000, 1)])
def test_a_budget_is_the_documents_with_the_lowest_places(
    tmp_path, prepare, sets, monkeypatch, budget, bits
):
    monkeypatch.setattr(selection, "BUCKET_BITS", bits)  # few: many documents in each bucket
    out = prepare(tmp_path / "out", *flags(sets, "--tokens", budget, "--seed", 3))
    every = [text for _, text in input_documents(sets)]
    expected = lowest(every, budget, seed=3)
    found = list(texts_of(out, "train"))
    assert Counter(found) == expected
    assert found == [text for text in every if text in expected][: len(found)]
    last = max(expected, key=lambda text: hash_place(text.encode(), 3))
    total = manifest_of(out)["splits"]["train"]["tokens"]
    assert budget <= total < budget + size(last)
    assert len(list(texts_of(out, "validation"))) == 4


def test_a_budget_among_copies_of_one_text_takes_the_first_ones(tmp_path, prepare):
    for name, count in (("train/a", 4), ("train/b", 6), ("validation/a", 1)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.jsonl").write_text('{"text": "copy!"}\n' * count)
    for budget, documents in ((6, 1), (25, 5), (60, 10)):
        out = prepare(tmp_path / f"{budget}", *flags(tmp_path, "--tokens", budget))
        assert manifest_of(out)["splits"]["train"]["documents"] == documents
    with pytest.raises(UserError, match="the training split has 60 tokens; ask for fewer"):
        prepare(tmp_path / "61", *flags(tmp_path, "--tokens", 61))


def test_a_budget_is_the_same_documents_in_any_order_of_the_files(tmp_path, prepare, sets):
    other = write_sets(tmp_path / "other", order=-1)
    found = [
        Counter(texts_of(prepare(tmp_path / name, *flags(path, "--tokens", "40K")), "train"))
        for name, path in (("a", sets), ("b", other))
    ]
    assert found[0] == found[1]
    larger = prepare(tmp_path / "c", *flags(sets, "--tokens", "50K"))
    assert not found[0] - Counter(texts_of(larger, "train")), "a larger budget has all of it"


@pytest.mark.parametrize(
    "wishes", [("--tokens", "30K"), ("--tokens", "60K", "--mixture", "Large=1,Middle=1,Small=0.3")]
)
def test_an_estimate_that_was_too_low_costs_a_round_and_changes_nothing(
    tmp_path, prepare, sets, monkeypatch, wishes, capsys
):
    expected = digests(prepare(tmp_path / "a", *flags(sets, *wishes)))
    assert "it is encoded again" not in capsys.readouterr().out
    monkeypatch.setattr(plan, "MARGIN", Fraction(1, 5))
    assert digests(prepare(tmp_path / "b", *flags(sets, *wishes))) == expected
    assert "it is encoded again" in capsys.readouterr().out


def test_a_small_budget_encodes_little_more_than_it_needs(tmp_path, prepare, sets):
    out = prepare(tmp_path / "out", *flags(sets, "--tokens", "20K", "--stage", "encode"))
    encoded = sum(file.stat().st_size for file in (out / "unfinished/parts").glob("part-*.bin")) / 2
    assert 20_000 < encoded < 40_000 < sum(size(text) for _, text in input_documents(sets))


def test_a_mixture_has_its_shares_and_repeats_what_is_short(tmp_path, prepare, sets):
    wishes = ("--tokens", "80K", "--mixture", "Large=5,Middle=2.5,Small=2.5")
    out = prepare(tmp_path / "out", *flags(sets, *wishes))
    of_set = {name: [] for name in (*SETS, "unknown")}
    for name, text in input_documents(sets):
        of_set[name].append(text)
    expected = Counter()
    for name, target in (("Large", 40_000), ("Middle", 20_000), ("Small", 20_000)):
        have = sum(map(size, of_set[name]))
        whole, missing = divmod(target, have)
        copies = Counter({text: n * whole for text, n in Counter(of_set[name]).items()})
        copies += lowest(of_set[name], missing)
        expected += copies
        total = sum(size(text) * n for text, n in copies.items())
        assert manifest_of(out)["sources"][name]["train"]["tokens"] == total
        assert target <= total < target + max(map(size, of_set[name]))
        assert manifest_of(out)["selection"][name]["whole"] == whole
    assert manifest_of(out)["selection"]["Small"]["whole"] >= 2
    found = list(texts_of(out, "train"))
    assert Counter(found) == expected
    once = [text for _, text in input_documents(sets) if text in expected]
    assert found[: len(once)] == once, "first every document once, in the order of the input"
    # The held-out documents are those of all sets, so that losses on mixtures compare.
    assert len(list(texts_of(out, "validation"))) == 4
    assert "unknown" not in manifest_of(out)["sources"] and "unknown" in manifest_of(out)["input"]


def test_a_mixture_without_a_budget_repeats_nothing(tmp_path, prepare, sets):
    out = prepare(tmp_path / "out", *flags(sets, "--mixture", "Large=1,Small=1"))
    tokens = {
        n: c["train"]["tokens"] for n, c in manifest_of(out)["sources"].items() if "train" in c
    }
    small = [text for name, text in input_documents(sets) if name == "Small"]
    assert tokens["Small"] == sum(map(size, small))
    assert tokens["Small"] <= tokens["Large"] < tokens["Small"] + 800
    assert max(Counter(texts_of(out, "train")).values()) <= 2  # the exact copies


def test_too_many_repetitions_are_refused_and_a_higher_limit_continues(
    tmp_path, prepare, sets, monkeypatch
):
    wishes = ("--tokens", "60K", "--mixture", "Large=1,Small=2")
    with pytest.raises(UserError, match=r"Small=2: 40,000 tokens .* repeated \d\.\d\d times; .*"):
        prepare(tmp_path / "out", *flags(sets, *wishes))
    monkeypatch.setattr(
        "data_prep.encode.job.encode_unit", None
    )  # nothing is encoded a second time
    prepare(tmp_path / "out", *flags(sets, *wishes, "--max-repeats", 9))
    assert manifest_of(tmp_path / "out")["selection"]["Small"]["whole"] > 4


def test_another_choice_of_an_unfinished_preparation_keeps_what_is_encoded(
    tmp_path, prepare, sets, monkeypatch
):
    expected = digests(prepare(tmp_path / "whole", *flags(sets, "--sets", "Large,Middle")))
    prepare(tmp_path / "out", *flags(sets, "--stage", "encode"))
    wishes = flags(sets, "--sets", "Large,Middle")
    with pytest.raises(UserError, match=r"unfinished .*sets was null, now .* or --overwrite"):
        prepare(tmp_path / "out", *wishes)
    monkeypatch.setattr("data_prep.encode.job.encode_unit", None)
    prepare(tmp_path / "out", *wishes, "--overwrite")
    monkeypatch.undo()
    assert digests(tmp_path / "out") == expected
    # The other way round, what was not encoded is.
    prepare(tmp_path / "more", *flags(sets, "--sets", "Small", "--stage", "encode"))
    prepare(tmp_path / "more", *wishes, "--overwrite")
    assert digests(tmp_path / "more") == expected


CHOICES = {
    "all": (),
    "tokens": ("--tokens", "10K"),
    "sets": ("--sets", "Middle,Small"),
    "mixture": ("--mixture", "Large=1,Small=1", "--tokens", "6K"),
    "repeat": ("--repeat", "Small=2", "--sets", "Small,Large"),
}


@pytest.fixture(scope="module")
def of_choices(tmp_path_factory, prepare, sets):
    folder = tmp_path_factory.mktemp("choices")
    return {c: digests(prepare(folder / c, *flags(sets, *CHOICES[c]))) for c in CHOICES}


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(choice, marks=() if choice == "mixture" else pytest.mark.nightly)
        for choice in CHOICES
    ],
)
def test_any_choice_after_any_other_is_as_from_a_fresh_folder(
    tmp_path, prepare, sets, of_choices, first
):
    for then in CHOICES.keys() - {first}:
        out = prepare(tmp_path / then, *flags(sets, *CHOICES[first], "--stage", "encode"))
        prepare(out, *flags(sets, *CHOICES[then], "--overwrite"))
        assert digests(out) == of_choices[then], f"{then} after {first}"


def test_another_choice_among_few_documents_holds_out_what_it_would_by_itself(tmp_path, prepare):
    lines = [
        json.dumps({"text": f"{n} of {name}", "meta": {"redpajama_set_name": name}}) + "\n"
        for name in "AB"
        for n in range(4)
    ]
    (tmp_path / "x.jsonl").write_text("".join(lines))
    given = ("--source", "files", "--path", tmp_path / "x.jsonl", "--tokenizer", "bytes")
    for seed in range(3):
        more = (*given, "--workers", 1, "--seed", seed)
        out = prepare(tmp_path / f"out{seed}", *more, "--sets", "A", "--stage", "encode")
        prepare(out, *more, "--sets", "B", "--overwrite")
        whole = prepare(tmp_path / f"whole{seed}", *more, "--sets", "B")
        assert digests(out) == digests(whole)


def test_sets_are_taken_and_left_out_and_counted(tmp_path, prepare, sets, capsys):
    out = prepare(tmp_path / "a", *flags(sets, "--sets", "Small,Large"))
    assert set(manifest_of(out)["sources"]) == {"Large", "Small"}
    printed = capsys.readouterr().out
    assert "left out: 20 documents of unknown" in printed
    middle = sum(name == "Middle" for name, _ in input_documents(sets))
    assert f"note: {middle + 1} documents of a set that SlimPajama does not have: 'Mid" in printed
    assert manifest_of(out)["input"]["Middle"]["train"]["documents"] == middle >= 120
    assert open_corpus(out, "validation").num_documents == 3
    out = prepare(tmp_path / "b", *flags(sets, "--exclude-sets", "unknown,Small"))
    assert set(manifest_of(out)["sources"]) == {"Large", "Middle"}
    with pytest.raises(UserError, match="no such set; there are Large, Middle, Small, unk"):
        prepare(tmp_path / "c", *flags(sets, "--exclude-sets", "nowhere"))


def test_a_fraction_is_held_out_beside_a_budget(tmp_path, prepare, sets):
    """A source without a validation split: a document's place decides first whether it is held."""
    given = ("--source", "files", "--path", sets / "train", "--tokenizer", "bytes", "--workers", 1)
    given += ("--validation-fraction", 0.2)
    whole = prepare(tmp_path / "whole", *given)
    some = prepare(tmp_path / "some", *given, "--tokens", "20K")
    assert list(texts_of(some, "validation")) == list(texts_of(whole, "validation"))
    assert Counter(texts_of(some, "train")) == lowest(texts_of(whole, "train"), 20_000)
