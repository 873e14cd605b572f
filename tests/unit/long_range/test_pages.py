"""Numbers, comparisons and words of a figure's page and picture."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from eval.common.comparison import t_quantile
from eval.common.grids import pictures
from eval.common.grids.places import CONTROL, NEGATIVE, Run
from eval.common.grids.summary import differences
from eval.common.grids.tuning import Choice as Rate
from eval.long_range import page
from eval.long_range.catalog import FIGURES
from eval.long_range.figure import told
from eval.long_range.mixers import make
from eval.long_range.plan import MODELS, SCALES, Choice, plan
from eval.long_range.tasks import make_task

NAMES = {"protocol": "clean", "is_causal": True, "provenance": {"command": "x"}}
NAMES["trained"] = {"commits": ["c" * 40], "machines": ["m"], "first": "2026", "last": "2027"}


def line(mixer: str, *runs: float, row: str = "listops") -> dict:
    where = {"row": row, "column": "", "mixer": mixer, "x": 32}
    return where | {"runs": {str(seed): value for seed, value in enumerate(runs)}}


def test_the_models_that_a_figure_is_about_are_compared():
    lines = [line("vanilla", 0.3, 0.4), line("s", 0.5, 0.7), line("cat-v", 0.6, 0.9)]
    pairs = (("cat-v", "s"), ("cat-v", "las"), ("vanilla", "s"))
    found = {(d["mixer"], d["minus"]): d for d in differences(lines, pairs)}
    assert list(found) == [("vanilla", "s"), ("vanilla", "cat-v"), ("cat-v", "s")]
    learned = found["cat-v", "s"]
    assert learned["mean"] == pytest.approx(0.15) and learned["comparisons"] == 3
    # Two seeds, 0.1 and 0.2: an error of the mean of 0.05.
    half = t_quantile(1 - 0.025 / 3, 1) * 0.05
    assert (learned["low"], learned["high"]) == pytest.approx((0.15 - half, 0.15 + half))
    assert len(differences(lines)) == 2


def runs(figure: str, tests: dict[str, tuple[float, ...]], share: float | None = 0.1):
    """A smoke figure's runs of one task with records.

    Args:
        tests: mixer -> the test of each seed; validation was half of it first, then all.
    """
    found = []
    for point in plan(figure, SCALES["smoke"], Choice()):
        run = point.run
        if run.row == CONTROL and run.column == "smnist":
            found.append((run, _record(run, 0.1, share), Rate(1e-3, {}, False)))
        elif run.row in ("smnist", "select"):
            for seed, value in enumerate(tests.get(run.line, ())):
                record = _record(run, value, share)
                found.append((point.at(1e-3, seed), record, Rate(1e-3, {}, False)))
    return found


def _record(run: Run, value: float, share: float | None) -> dict:
    test = {"rows": 100, "most_frequent": share, "origin": {}}
    return {
        **{"value": value, "exchanged": 0.1, "metric": "r2" if share is None else "accuracy"},
        "history": [{"step": 5, "value": value / 2}, {"step": 10, "value": value}],
        **{"data": {"test": test, "train": {"rows": 9}}, "cell": run.cell.key(), "layers": 1},
        **{"task": {}, "notes": [], "steps": 10, "seconds": {"training": 1.0}},
    }


def test_a_figure_compares_its_pairs():
    tests = {"vanilla": (0.3, 0.4), "s": (0.5, 0.7), "cat-v": (0.6, 0.9), NEGATIVE: (0.2,)}
    record = told("smnist", "smoke", runs("smnist", tests))
    assert [(d["mixer"], d["minus"]) for d in record["differences"]] == [
        *(("vanilla", "s"), ("vanilla", "cat-v"), ("cat-v", "s"))
    ]


def test_a_page_says_why_it_has_no_differences():
    alone = "No task has two models at one length, beside the control: nothing to compare."
    one_seed = "One seed: no difference can be told from chance."
    for vanilla, others, said in (
        ((0.3, 0.4, 0.5), {}, alone),
        ((0.3,), {}, alone),
        ((0.3,), {"las": (0.5,)}, one_seed),
        ((0.3, 0.4), {"las": (0.5, 0.7)}, "## Differences"),
    ):
        tests = {"vanilla": vanilla, NEGATIVE: (0.2,)} | others
        text = page.markdown(told("smnist", "smoke", runs("smnist", tests)) | NAMES)
        assert [x for x in (alone, one_seed, "## Differences") if x in text] == [said]


def test_a_model_that_diverged_is_told_and_has_no_difference():
    tests = {"vanilla": (0.3, 0.4), "las": (0.5, -math.inf), NEGATIVE: (-math.inf,)}
    record = told("smnist", "smoke", runs("smnist", tests))
    text = page.markdown(record | NAMES)
    assert "`las` on smnist with seed 1; `none` on smnist with seed 0." in text
    assert "Diverged" not in page.markdown(
        told("smnist", "smoke", runs("smnist", tests | {"las": (0.5,), NEGATIVE: (0.2,)})) | NAMES
    )
    # A bag of tokens that diverged is beaten where the most frequent class is, with a margin.
    assert record["controls"][0]["bound"] == pytest.approx(0.1 + 5 * 0.03)
    (difference,) = record["differences"]
    assert difference["verdict"] == "unclear"


def test_steps_are_counted_to_one_level_for_all_models_of_a_task():
    tests = {"vanilla": (0.5, 0.7), "las": (0.9, 1.1), "s": (0.9, 0.2), NEGATIVE: (0.2,)}
    record = told("smnist", "smoke", runs("smnist", tests))
    assert record["tasks"]["smnist"]["level"] == pytest.approx(0.9)  # of LaS' mean of 1
    steps = {x["mixer"]: x["steps"] for x in record["lines"]}
    assert steps == {
        **{"vanilla": {"0": None, "1": None}, "las": {"0": 10, "1": 10}},
        **{"s": {"0": 10, "1": None}, NEGATIVE: {"0": None}},
    }
    cells = {
        row.split("|")[2].strip(): row.split("|")[8].strip()
        for row in page.markdown(record | NAMES).splitlines()
        if row.startswith("| smnist |") and row.count("|") > 8
    }
    assert (cells["vanilla"], cells["las"], cells["s"]) == ("", "10", "10 (1 of 2)")
    none = told("atomic", "smoke", runs("atomic", {"nope": (-0.1, -0.3), NEGATIVE: (-1,)}, None))
    assert none["tasks"]["select"]["level"] is None
    assert none["lines"][0]["steps"] == {"0": None, "1": None}


@pytest.mark.parametrize(
    ("values", "bottom", "lowest"),
    [
        ((0.5, 0.25), -0.03, 0.25),
        ((0.5, -0.4), -0.43, -0.4),
        ((0.5, -math.inf), -0.03, -0.03),
        ((-0.2, -7.0), -1.03, -1.03),
    ],
)
def test_a_picture_shows_what_is_below_0_and_what_diverged(values, bottom, lowest):
    rows, points = drawn_of({"nope": values})
    drawing = pictures.draw(rows, lambda *each: dict.fromkeys((32, 64), points(*each)), "")
    (axes,) = drawing.axes
    assert axes.get_ylim() == pytest.approx((bottom, 1.05))
    (every,) = axes.collections
    assert sorted(every.get_offsets()[:, 1])[0] == pytest.approx(lowest)
    assert set(axes.lines[0].get_ydata()) == {max(bottom, sum(values) / 2)}


def drawn_of(values):
    """What `pictures.draw` takes of a figure's models with their numbers."""
    found = runs("atomic", values, None)
    numbers = {id(record): record["value"] for _, record, _ in found}
    return [(run, record) for run, record, _ in found], lambda _, record: numbers[id(record)]


@pytest.mark.parametrize(
    ("values", "edges", "inside", "mean", "told"),
    [
        ((0.5, 0.25), (0.23, 0.52), [0.5, 0.25], 0.375, []),
        ((0.5, 0.5), (0.4884, 0.5116), [0.5, 0.5], 0.5, []),  # never as narrow as rounding
        ((1.0, 0.5), (0.46, 1.04), [1.0, 0.5], 0.75, []),
        ((1.0, 1.0), (0.9784, 1.0016), [1.0, 1.0], 1.0, []),  # R² and accuracy end at 1
        ((0.5, 0.3, -math.inf), (0.284, 0.516), [0.5, 0.3], 0.4, ["1 diverged"]),
        ((0.5, -7.0), (0.4884, 0.5116), [0.5], None, ["← -7.000"]),
        ((0.5, -7.0, math.inf), (0.4884, 0.5116), [0.5], None, ["← -7.000, 1 diverged"]),
        ((-3.0, -50.0), (-53.76, 0.76), [-3.0, -50.0], -26.5, None),
        ((math.inf, -math.inf, math.nan), (-0.08, 1.08), [], None, ["3 diverged"]),
    ],
)
def test_a_figure_of_one_length_is_a_strip_with_named_rows(values, edges, inside, mean, told):
    rows, points = drawn_of({"nope": values, NEGATIVE: (-2.0,)})
    drawing = pictures.draw(rows, lambda *each: {32: points(*each)}, "", measure="r2")
    (axes,) = drawing.axes
    assert axes.get_title("left") == "select, sequence length 32"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("R²", "")
    assert [x.get_text() for x in axes.get_yticklabels()] == [
        "nope (1 layer)",
        f"{NEGATIVE} (control)",
    ]
    assert axes.get_xlim() == pytest.approx(edges, abs=2e-3)
    runs_of = axes.lines[0]
    assert runs_of.get_xdata().tolist() == inside
    assert len({*runs_of.get_ydata()}) == len(inside)  # equal ones are seen beside each other
    bars = [x.get_xdata()[0] for x in axes.lines if x.get_marker() == "|"]
    control_is_inside = told is None
    assert bars == [mean] * (mean is not None) + [-2.0] * control_is_inside
    # Elsewhere it is a number at the edge, so that the others are not squeezed together.
    words = [] if control_is_inside else [*told, "← -2.000"]
    assert [text.get_text() for text in axes.texts] == words
    (legend,) = [text.get_text() for text in drawing.legends[0].get_texts()]
    assert legend == "every run (bar: the mean)"


def test_a_control_within_the_strip_is_drawn_and_one_above_it_told():
    rows, points = drawn_of({"nope": (0.5, 0.25), NEGATIVE: (0.4, 0.9)})
    (axes,) = pictures.draw(rows, lambda *each: {32: points(*each)}, "").axes
    assert [x.get_xdata().tolist() for x in axes.lines if x.get_marker() == "x"] == [[0.4]]
    assert [text.get_text() for text in axes.texts] == ["0.900 →"]


def test_a_ceiling_widens_the_strip_and_stands_in_it():
    rows, points = drawn_of({"nope": (0.95, 0.9)})
    drawing = pictures.draw(rows, lambda *each: {32: points(*each)}, "", lambda *_: {32: 0.5})
    (axes,) = drawing.axes
    assert axes.get_xlim()[0] < 0.5 < axes.get_xlim()[1]
    assert [0.5, 0.5] in [list(x.get_xdata()) for x in axes.lines]
    assert "one token matched alone" in [x.get_text() for x in drawing.legends[0].get_texts()]


def test_strips_of_several_panels_say_that_their_ranges_differ():
    rows, _ = drawn_of({"nope": (0.5,)})
    rows += [(replace(run, row="cumsum"), record) for run, record in rows]
    drawing = pictures.draw(rows, lambda *_: {32: 0.5}, "")
    (told,) = [text.get_text() for text in drawing.legends[0].get_texts()]
    assert len(drawing.axes) == 2 and told.endswith("; each panel has its own range")


def test_every_pair_is_of_models_that_some_figure_has():
    chunk = SCALES["cpu"].chunk
    for name, figure in FIGURES.items():
        models = {model.format(chunk=chunk) for model in MODELS[name]}
        pairs = [tuple(x.format(chunk=chunk) for x in pair) for pair in figure.pairs]
        assert all(len({*pair}) == 2 for pair in pairs)
        if name in ("atomic", "ablation"):
            assert pairs and {x for pair in pairs for x in pair} <= models
        elif name in ("lra", "smnist"):
            assert {("cat-v", "s"), ("cat-v", "las")} <= {*pairs}


def test_a_rate_on_the_edge_of_those_tried_is_marked():
    tests = {"vanilla": (0.3, 0.4), "las": (0.5, 0.6), NEGATIVE: (0.2,)}
    found = runs("smnist", tests)
    assert "The rate was chosen" not in page.markdown(told("smnist", "smoke", found) | NAMES)
    choices = {"vanilla": Rate(1e-3, {1e-4: 0.1, 1e-3: 0.2}, True)}
    tuned = [(run, record, choices.get(run.line, rate)) for run, record, rate in found]
    text = page.markdown(told("smnist", "smoke", tuned) | NAMES)
    assert text.count("≥ 0.001") == 1
    assert "In 1 of 3 rows it is the least or largest of those tried" in text


def test_a_page_tells_where_rows_are_other_than_the_official_ones():
    text = page.markdown(
        told("smnist", "smoke", runs("smnist", {"las": (1,), NEGATIVE: (0,)})) | NAMES
    )
    assert make_task("smnist").counted("validation", 6) == "validation: 6 rows"  # it has none
    assert "test: 100 rows (official: 10,000), train: 9 rows (official: 60,000);" in text


def test_a_protocol_is_named_where_a_task_heeds_it():
    record = told("smnist", "smoke", runs("smnist", {"las": (1,), NEGATIVE: (0,)})) | NAMES
    assert "protocol" not in page.markdown(record)
    record["tasks"]["smnist"]["task"] = make_task("imdb").describe()
    assert "; protocol=clean." in page.markdown(record)


def test_alibi_stands_beside_models_that_have_no_positions_either():
    names = {model.format(chunk=32) for model in MODELS["ablation"]}
    positions = {name: make(name).options.position for name in names}
    assert {name.partition(":")[0] for name, x in positions.items() if x == "none"} == {
        *("nope", "l", "las"),
    }
    assert all(make(name).options.chunk == 32 for name in names)
    assert "in place of the absolute positions" in FIGURES["ablation"].doubts


def test_the_papers_gap_on_mnist_beside_the_deviation_of_two_tests():
    deviation = math.sqrt(2 * 10_000 * 0.99 * 0.01)
    assert 14 < deviation < 15 and 28 / deviation == pytest.approx(2, abs=0.1)
    assert "about twice" in FIGURES["smnist"].doubts and "15 images" in FIGURES["smnist"].doubts


@pytest.mark.parametrize(
    ("figure", "mixer", "number"),
    [
        ("smnist", "las", "0.9918"),
        ("smnist", "las:chunk=7", ""),  # the paper's reads whole rows
        ("ablation", "las:chunk=8", "0.6490"),  # and here chunks alone
        ("ablation", "las", ""),
        ("lra", "las:chunk=128", "0.6490"),
        ("lra", "las:chunk=8", ""),
    ],
)
def test_the_papers_number_stands_beside_its_own_model_alone(figure, mixer, number):
    row = "smnist" if figure == "smnist" else "cifar10"
    line = {"row": row, "mixer": mixer, "x": 1, "runs": {"0": 0.5}, "steps": {"0": None}}
    line |= dict.fromkeys(("mean", "min", "max"), 0.5) | {
        "tried": [],
        "lr": 1e-3,
        "lr_on_edge": False,
    }
    record = {"figure": figure, "metric": "accuracy", "lines": [line], "tasks": {}}
    (told,) = page._table(record).splitlines()[2:]
    assert told.split("|")[-2].strip() == number
