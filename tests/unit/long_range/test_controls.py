"""Controls of figures: who must learn a task, and who must not."""

from __future__ import annotations

import pytest

from eval.common.grids.places import CONTROL, NEGATIVE
from eval.long_range import page
from eval.long_range.controls import controls
from eval.long_range.plan import SCALES, Choice, plan


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
    for place in plan(figure, SCALES["smoke"], Choice()):
        name = CONTROL if place.run.row == CONTROL else place.run.line
        for seed, more in ((0, -0.01), (1, 0.01)) if name != CONTROL else ((0, 0.0),):
            value = values.get(name, 0.5) + (0.0 if name == NEGATIVE else more)
            test = {"rows": rows, "most_frequent": share}
            record = {"value": value, "exchanged": exchanged + more, "data": {"test": test}}
            of.append((place.at(1e-3, seed), record))
    return {(c["row"], c["what"]): c for c in controls(of)}


def test_the_first_model_must_learn_the_atomic_tasks():
    made = found("atomic", {"nope": 0.94, "las:position=none": 0.99, NEGATIVE: 0.01})
    learns = [made[row, "learns"] for row in ("select", "cumsum", "cummax")]
    assert [c["mixer"] for c in learns] == ["nope"] * 3
    assert [c["value"] for c in learns] == pytest.approx([0.94] * 3)
    assert [c["bound"] for c in learns] == [0.9, 0.95, 0.95]
    assert [c["passed"] for c in learns] == [True, False, False]
    assert made["select", "mixes nothing"]["passed"]
    assert not found("atomic", {NEGATIVE: 0.06})["select", "mixes nothing"]["passed"]


def test_on_classes_the_best_model_is_compared_with_one_that_mixes_nothing():
    def passed(las: float, nothing: float, shuffled: float) -> list[bool]:
        values = {"las": las, "vanilla": 0.2, NEGATIVE: nothing, CONTROL: shuffled}
        made = found("context", values, share=0.2)
        positive, negative = made["listops", "learns"], made["listops", "other rows' labels"]
        assert positive["mixer"] == "las" and positive["value"] == pytest.approx(las)
        # Five deviations of 100 rows: 0.05 at 0.5, 0.04 at 0.2.
        assert positive["bound"] == pytest.approx(0.75) and negative["bound"] == pytest.approx(0.4)
        return [positive["passed"], negative["passed"]]

    assert passed(0.8, 0.5, 0.3) == [True, True]
    assert passed(0.7, 0.5, 0.45) == [False, False]


def test_rows_with_others_inputs_are_answered_by_chance():
    passed = found("context", {}, share=0.2, exchanged=0.38)["listops", "other rows' inputs"]
    assert passed["mixer"] == "las" and passed["passed"]
    assert (passed["value"], passed["bound"]) == pytest.approx((0.39, 0.4))
    failed = found("context", {}, share=0.2, exchanged=0.4)["listops", "other rows' inputs"]
    assert not failed["passed"]
    (told,) = page.warnings({"controls": [failed]})
    assert "by another way than its rows" in told and "other rows' inputs" in told
