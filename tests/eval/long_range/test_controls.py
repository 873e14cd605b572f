"""Controls of figures: who must learn a task, and who must not."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from eval.lab.page import warnings
from eval.lab.places import CONTROL, NEGATIVE
from eval.lab.study import StudyOptions
from eval.long_range.grids import Choice, controls
from eval.long_range.tasks import Place
from eval.studies import STUDIES


def _arena(*rows: str):
    """The places of the arena at the paper's scale, as if its files were there."""
    choice = Choice(place=Place(Path("official"), Path("cache")))
    return STUDIES.get("lra").places(StudyOptions("paper", rows=rows, more={"long_range": choice}))


def found(
    figure: str,
    values: dict[str, float],
    share: float | None = None,
    exchanged: float = 0.0,
    rows: int = 100,
) -> dict[tuple[str, str], dict]:
    """Controls of a smoke figure by what they are about, of two seeds 0.02 apart.

    Args:
        values: line -> the mean of its tests, CONTROL's for those with other rows' labels.
        share: of the most frequent class; exchanged: accuracy on rows with others' inputs.
    """
    of = []
    for place in STUDIES.get(figure).places(StudyOptions("smoke")):
        name = CONTROL if place.run.row == CONTROL else place.run.line
        for seed, more in ((0, -0.01), (1, 0.01)) if name != CONTROL else ((0, 0.0),):
            value = values.get(name, 0.5) + (0.0 if name == NEGATIVE else more)
            test = {"rows": rows, "most_frequent": share}
            record = {"value": value, "exchanged": exchanged + more, "data": {"test": test}}
            of.append((place.at(1e-3, seed), record))
    return {(c.row, c.what): c for c in controls(of)}


def test_the_first_model_must_learn_the_atomic_tasks():
    made = found("atomic", {"nope": 0.94, "las:position=none": 0.99, NEGATIVE: 0.01})
    learns = [made[row, "learns"] for row in ("select", "cumsum", "cummax")]
    assert [c.line for c in learns] == ["nope"] * 3
    assert [c.value for c in learns] == pytest.approx([0.94] * 3)
    assert [c.bound for c in learns] == [0.9, 0.95, 0.95]
    assert [c.passed for c in learns] == [True, False, False]
    assert made["select", "mixes nothing"].passed
    assert not found("atomic", {NEGATIVE: 0.06})["select", "mixes nothing"].passed


def test_on_classes_the_best_model_is_compared_with_one_that_mixes_nothing():
    def passed(las: float, nothing: float, shuffled: float) -> list[bool]:
        values = {"las": las, "vanilla": 0.2, NEGATIVE: nothing, CONTROL: shuffled}
        made = found("context", values, share=0.2)
        positive, negative = made["listops", "learns"], made["listops", "other rows' labels"]
        assert positive.line == "las" and positive.value == pytest.approx(las)
        # Five deviations of 100 rows: 0.05 at 0.5, 0.04 at 0.2.
        assert positive.bound == pytest.approx(0.75) and negative.bound == pytest.approx(0.4)
        return [positive.passed, negative.passed]

    assert passed(0.8, 0.5, 0.3) == [True, True]
    assert passed(0.7, 0.5, 0.45) == [False, False]


def test_rows_with_others_inputs_are_answered_by_chance():
    passed = found("context", {}, share=0.2, exchanged=0.38)["listops", "other rows' inputs"]
    assert passed.line == "las" and passed.passed
    assert (passed.value, passed.bound) == pytest.approx((0.39, 0.4))
    failed = found("context", {}, share=0.2, exchanged=0.4)["listops", "other rows' inputs"]
    assert not failed.passed
    (told,) = warnings({"controls": [asdict(failed) | {"passed": False}], "diverged": []})
    assert "by another way than its rows" in told and "other rows' inputs" in told


def test_where_classes_are_read_from_the_last_position():
    """What mixes nothing is a bag of tokens, to be beaten, and one position, which guesses."""
    points = _arena()
    nothing = [p.run for p in points if p.run.line == NEGATIVE]
    pools = {(r.row == CONTROL, r.column or r.row): r.cell.pool for r in nothing}
    tasks = ("listops", "imdb", "aan", "cifar10", "pathfinder")
    assert pools == {
        **{(False, task): "mean" for task in tasks},
        **{(True, task): "last" for task in ("imdb", "pathfinder")},
    }
    models = {r.row: r.cell.pool for p in points if (r := p.run).line == "vanilla"}
    assert models["imdb"] == "last" and models["listops"] == "mean"
    test = {"rows": 100, "most_frequent": 0.5}
    rows = []
    for point in _arena("imdb"):
        alone = point.run.row == CONTROL and point.run.line == NEGATIVE
        rows.append(
            (point.run, {"value": 0.8 if alone else 0.6, "exchanged": 0.5, "data": {"test": test}})
        )
    found = {(c.what, c.line): c for c in controls(rows)}
    failed = found["mixes nothing", NEGATIVE]
    assert failed.bound == pytest.approx(0.75) and not failed.passed
    assert found["other rows' labels", "vanilla"].passed
