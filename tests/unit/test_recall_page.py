"""A figure's page and picture: every number where it belongs, and what spoils it first."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from eval.common.grids import pictures
from eval.recall.grids import figure as grid
from eval.recall.grids.catalog import FIGURES
from eval.recall.grids.plan import CONTROL, NEGATIVE, Run
from eval.recall.show import page
from eval.recall.train.cell import Cell


def control(passed: bool, accuracy: float = 0.5) -> dict:
    places = {"row": "MQAR", "column": "d = 8", "seq_len": 16, "accuracy": accuracy}
    negative = {**places, "chance": 0.1, "at_most": 0.2, "passed": passed}
    positive = {"row": "MQAR", "mixer": "attention", "layers": 2, "task": "mqar:keys=4"}
    positive |= {"d_model": 8, "seq_len": 16, "accuracy": accuracy, "min": accuracy - 0.01}
    return {
        "positive": [positive | {"at_least": 0.99, "passed": passed}],
        "negative": [negative],
    }


def test_failed_controls_are_told():
    positive, negative = page.warnings({"controls": control(False), "diverged": []})
    assert "0.5000" in positive and "under-trained" in positive
    assert "of MQAR failed: `attention` with 2 layers reaches" in positive
    assert "at width 8 and length 16" in positive
    assert "length 16" in negative and "0.2000" in negative
    assert not page.warnings({"controls": control(True), "diverged": []})


def test_runs_that_diverged_are_told():
    lost = {"row": "MQAR", "column": "d = 8", "mixer": "mamba", "seed": 3}
    (told,) = page.warnings({"controls": control(True), "diverged": [lost]})
    # Of a control that diverged nothing is said of what its task gives away.
    of_nothing = control(True) | {"negative": control(False, -math.inf)["negative"]}
    assert page.warnings({"controls": of_nothing, "diverged": [lost]}) == [told]
    assert told.startswith("Diverged") and "`mamba` on MQAR, d = 8 with seed 3." in told


def test_lines_are_told_apart():
    names = [f"mixer{i}" for i in range(12)]
    looks = [pictures._style(i, name) for i, name in enumerate(names)]
    looks.append(pictures._style(12, NEGATIVE))
    keys = ("color", "linestyle", "marker", "markerfacecolor")
    assert len({tuple(look.get(key) for key in keys) for look in looks}) == 13
    assert len({(look["color"], look["linestyle"]) for look in looks}) == 13


def line(mixer: str, length: int, mean: float, rate: float = 0.01, row: str = "MQAR") -> dict:
    """A line whose numbers all differ, with two runs."""
    values = {"mean": mean, "min": mean - 0.03, "max": mean + 0.01}
    place = {"row": row, "column": "d = 8", "mixer": mixer, "x": length}
    runs = {"0": mean, "1": mean - 0.1}
    rates = {"lr": rate, "lr_on_edge": True, "tried": {"0.01": 0.5, "0.1": 0.6}}
    return {**place, **values, **rates, "runs": runs, "also": {}}


def record(lines: list[dict], **changes: object) -> dict:
    return {
        "figure": "accuracy",
        "not_run": [],
        "diverged": [],
        "shows": "x",
        "scale": "cpu",
        "number in the paper (AAAI / workshop / arXiv)": "5 / 3 / 5",
        "axis": "length",
        "tuning_seed": 77,
        "lines": lines,
        "fixed_items": [],
        "differences": [],
        "filters": [],
        "controls": control(True, 0.1),
        "provenance": {"command": "run it"},
        "trained": {"commits": ["c" * 40], "machines": ["m"], "first": "2026", "last": "2027"},
        **changes,
    }


def test_a_page_says_who_solves_the_task_and_where_the_others_end():
    lines = [line("cat", 16, 0.995), line("cat", 32, 0.991), line("mamba", 16, 1.0)]
    lines += [line("mamba", 32, 0.25, 0.1), line(NEGATIVE, 16, 0.05), line(NEGATIVE, 32, 0.05)]
    lines += [line("cat", 16, 0.5, row="MQNAR"), line("attention", 16, 1.0, row="control")]
    text = page.markdown(record(lines))
    told = [part for part in text.splitlines() if "or more at every length" in part]
    assert told == [
        "- MQAR, d = 8: 0.99 or more at every length: cat; least of the others: mamba 0.2500 "
        "(length 32).",
        "- MQNAR, d = 8: 0.99 or more at every length: none; least of the others: cat 0.5000 "
        "(length 16).",
    ]
    assert "filters" not in text and "under-trained" not in text


def test_every_number_of_a_line_is_in_its_column():
    lines = [line("cat", 16, 0.9), line("mamba", 32, 0.25, 0.1), line("none", 32, 0.15, 0.1)]
    lines[2]["lr_on_edge"] = False
    text = page.markdown(record(lines, fixed_items=lines[:1]))
    rows = [row for row in text.splitlines() if row.startswith("| MQAR")]
    assert rows == [
        "| MQAR | d = 8 | `cat` | 16 | 0.9000 | 0.8700 | 0.9100 | ≤ 0.01 | 2 |",
        "| MQAR | d = 8 | `mamba` | 32 | 0.2500 | 0.2200 | 0.2600 | ≥ 0.1 | 2 |",
        "| MQAR | d = 8 | `none` | 32 | 0.1500 | 0.1200 | 0.1600 | 0.1 | 2 |",
        "| MQAR | d = 8 | `cat` | 16 | 0.9000 | 0.8700 | 0.9100 | ≤ 0.01 | 2 |",
    ]
    (head,) = {row for row in text.splitlines() if row.startswith("| task")}
    assert head == "| task | width | mixer | length | mean | least | largest | lr | runs |"
    assert "In 2 of 3 rows it is the least or largest" in text and "seed 77" in text
    assert text.index(head) < text.index("as many keys as in training") < text.rindex(head)
    assert "one token" not in text and "generated" not in text


def test_a_rate_of_many_digits_has_the_side_that_it_lies_on():
    one = line("cat", 16, 0.9, 0.00123456789) | {"tried": {"0.00123457": 0.9, "0.01": 0.8}}
    assert "| ≤ 0.00123457 |" in page.markdown(record([one]))


def test_what_tests_found_beside_the_accuracy_has_columns_of_its_own():
    lines = [line("cat", 16, 0.9, row="hard MQNAR"), line("cat", 16, 0.5)]
    beside = {"accuracy_shared": 0.25, "accuracy_unshared": 0.75, "one_token_ceiling": 0.5}
    lines[0]["also"] = beside | {"one_token_expected": 0.51}
    text = page.markdown(record(lines))
    assert "| largest | shared | unshared | one token | lr |" in text
    assert "| 0.9100 | 0.2500 | 0.7500 | 0.5000 | ≤ 0.01 |" in text
    assert "| 0.5100 | – | – | – | ≤ 0.01 |" in text and "another key has too" in text
    lines[0]["also"] = {"free_running_accuracy": 0.125, "free_running_rows_right": 0.0}
    text = page.markdown(record(lines))
    assert "| largest | generated | lr |" in text and "| 0.9100 | 0.1250 | ≤ 0.01 |" in text
    assert "(accuracy-generated.png)" in text


def test_differences_say_how_many_they_are_and_which_their_intervals_carry():
    found = {"row": "MQAR", "column": "L = 8", "x": 32, "mixer": "cat", "minus": "mamba"}
    found |= {"mean": 0.25, "low": -0.125, "high": 0.625, "n": 3, "comparisons": 14}
    lines = [line("cat", 16, 0.9)]
    text = page.markdown(record(lines, differences=[found | {"verdict": "unclear"}], axis="width"))
    assert "over 3 seeds; 95% for all 14 intervals together" in text
    assert (
        "| MQAR | L = 8 | 32 | `cat` − `mamba` | +0.2500 | -0.1250 to +0.6250 | unclear |" in text
    )
    assert "| task | length | mixer | width |" in text and "0.99 or more at every width" in text
    same = found | {"low": None, "high": None, "verdict": "unclear"}
    text = page.markdown(record(lines, differences=[same]))
    assert re.search(r"\| `cat` − `mamba` \| \+0.2500 \| +\| unclear \|", text)


@pytest.mark.parametrize("name", FIGURES)
def test_one_layer_of_based_is_told_where_it_is_run(name):
    text = page.markdown(record([line("cat", 16, 0.9)], figure=name))
    assert ("one layer of Based" in text) == FIGURES[name].one_layer


def test_both_controls_are_on_the_page():
    good, bad = control(True, 0.15)["negative"][0], control(False, 0.25)["negative"][0]
    found = {"positive": control(True, 0.995)["positive"], "negative": [good, bad, good]}
    text = page.markdown(record([line("cat", 16, 0.995)], controls=found))
    assert "Positive, MQAR: `attention` with 2 layers, trained as all are, at width 8" in text
    assert (
        "reaches 0.9950 in the mean over seeds (least 0.9850); 0.99 or more is wanted: passed."
        in (text)
    )
    enough = "The budget is enough for this model; another that fails may need more."
    assert enough in text
    assert "at chance in 2 of 3 places; the highest against its limit is 0.2500 at" in text
    assert "MQAR, d = 8, length 16 (chance 0.1000, limit 0.2000): **failed**." in text
    assert text.split("\n\n")[1].startswith("> **The negative control failed at MQAR")
    found = {"positive": control(False, 0.5)["positive"], "negative": [good]}
    text = page.markdown(record([line("cat", 16, 0.995)], controls=found))
    assert "(least 0.4900); 0.99 or more is wanted: **failed**." in text and enough not in text
    assert "in 1 of 1 places" in text and "limit 0.2000): passed." in text


def test_learned_filters_are_listed_by_head():
    head = {"layer": 0, "head": 1, "single": 0.875}
    heads = [
        {**head, "delays": {"q": 0, "k": 3, "v": 2}, "key_is_one_more": True},
        {**head, "delays": {"k": 1}, "key_is_one_more": False},
        {**head, "delays": {"q": 1, "v": 2}, "key_is_one_more": None},
    ]
    place = {"row": "MQAR", "column": "d = 8", "mixer": "cat", "seq_len": 16, "accuracy": 0.5}
    text = page.markdown(record([line("cat", 16, 0.9)], filters=[{**place, "heads": heads}]))
    rows = [row for row in text.splitlines() if row.startswith("| MQAR")][1:]
    start = "| MQAR | d = 8 | `cat` | 16 | 0.5000 | 0 | 1 | "
    assert rows == [
        f"{start}0 | 3 | 2 | 0.88 | yes |",
        f"{start}– | 1 | – | 0.88 | no |",
        f"{start}1 | – | 2 | 0.88 | several taps |",
    ]
    assert "layer | head | q | k | v | single | holds |" in text
    assert "delay(k) = delay(q) + delay(v) + 1" in text
    for head in heads:
        del head["key_is_one_more"]  # as for copying
    text = page.markdown(record([line("cat", 16, 0.9)], filters=[{**place, "heads": heads}]))
    rows = [row for row in text.splitlines() if row.startswith("| MQAR")][1:]
    assert rows[0] == f"{start}0 | 3 | 2 | 0.88 |"
    assert "| v | single |\n" in text and "delay(k)" not in text


def accuracies(run: Run, record: dict) -> dict[int, float]:
    return {run.cell.seq_len: record["accuracy"]}


def test_a_picture_shows_every_run_in_its_panel_and_the_mean_as_a_line():
    cell = Cell("mqar:vocab_size=64", "cat", 16, 16)
    cat = Run("MQAR", "d = 16", "cat", cell)
    runs = [(cat, 0.75), (replace(cat, cell=replace(cell, seed=1)), 0.5)]
    runs += [(replace(cat, cell=replace(cell, seq_len=64)), 0.25)]
    runs += [(replace(cat, line="mamba"), 0.375), (replace(cat, column="d = 8"), 0.125)]
    runs += [(replace(cat, row="MQNAR", line=NEGATIVE), 0.0625)]
    runs += [(replace(cat, row=CONTROL, line="attention"), 1.0)]
    rows = [(run, {"accuracy": y, "layers": 1 + (run.line == "mamba")}) for run, y in runs]
    drawing = pictures.draw(rows, accuracies, "a title")
    panels = {axes.get_title(loc="left"): axes for axes in drawing.axes}
    assert list(panels) == ["MQAR, d = 16", "MQAR, d = 8", "MQNAR, d = 16", "MQNAR, d = 8"]
    lines = {title: [list(x.get_ydata()) for x in axes.lines] for title, axes in panels.items()}
    assert lines == {
        "MQAR, d = 16": [[0.625, 0.25], [0.375]],
        "MQAR, d = 8": [[0.125]],
        "MQNAR, d = 16": [[0.0625]],
        "MQNAR, d = 8": [],
    }
    first = panels["MQAR, d = 16"]
    assert [c.get_offsets()[:, 1].tolist() for c in first.collections] == [
        [0.75, 0.5, 0.25],
        [0.375],
    ]
    assert first.lines[0].get_xdata() == pytest.approx([16, 64], rel=0.05)
    assert first.get_xscale() == "log" and first.get_ylim()[1] > 1
    assert first.get_xticks().tolist() == [16, 64]
    assert [text.get_text() for text in first.get_xticklabels()] == ["16", "64"]
    labels = [text.get_text() for text in drawing.legends[0].get_texts()]
    assert labels == [
        *("cat (1 layer)", "mamba (2 layers)", f"{NEGATIVE} (control)"),
        "every run (line: the mean)",
    ]
    assert drawing.get_suptitle() == "a title"


@pytest.mark.parametrize("name", FIGURES)
def test_a_pictures_title_stands_clear_of_its_legend(name):
    failed = [{"row": row, "passed": False} for row in ("MQAR", "MQAR", "hard MQNAR")]  # at widths
    passed = [{"row": "MQNAR", "passed": True}]
    record = {"figure": name, "scale": "smoke"}
    found = {"positive": failed[:1] + passed, "negative": [*passed, *failed[1:]]}
    title = grid.picture_title(record | {"controls": found})
    run = Run("MQAR", "d = 16", "attention:position=rope", Cell("mqar", "attention", 16, 16))
    rows = [(run, {"accuracy": 1.0, "layers": 2})]
    drawing = pictures.draw(
        rows, lambda *_: {16: 1.0, 32: 1.0}, f"{title}\nas many keys as trained"
    )
    FigureCanvasAgg(drawing).draw()
    legend, (words,) = drawing.legends[0].get_window_extent(), drawing.texts
    assert "control failed: MQAR, hard MQNAR\n" in words.get_text()
    assert words.get_window_extent().x1 < legend.x0
    assert legend.x1 <= drawing.bbox.x1


def test_a_long_name_in_the_legend_takes_no_room_from_the_panel():
    def widths(mixer):
        run = Run("1 layer", "d = 16", mixer, Cell("selective-copy", "cat", 16, 16))
        rows = [(run, {"accuracy": 1.0, "layers": 1})]
        drawing = pictures.draw(rows, lambda *_: {16: 1.0, 32: 1.0}, "selective-copy, cpu scale")
        FigureCanvasAgg(drawing).draw()
        legend, (words,) = drawing.legends[0].get_window_extent(), drawing.texts
        assert words.get_window_extent().x1 < legend.x0 and legend.x1 <= drawing.bbox.x1
        return drawing.axes[0].get_window_extent().width

    long = "cat:filter=exponential,filter_state=1,streams=q,init=identity"
    assert widths(long) > 0.9 * widths("cat")


def test_rows_of_one_column_stand_beside_each_other_below_a_broken_title():
    cell = Cell("mqar", "cat", 16, 16)
    rows = [(Run(row, "", "cat", cell), {"accuracy": 1.0, "layers": 2}) for row in ("a", "b", "c")]
    title = f"first\n{'control failed, ' * 20}"
    curves = pictures.draw(rows, lambda *_: {16: 1.0, 32: 1.0}, title, measure="r2")
    FigureCanvasAgg(curves).draw()
    boxes = [axes.get_window_extent() for axes in curves.axes]
    assert [axes.get_title("left") for axes in curves.axes] == ["a", "b", "c"]
    assert len({box.y0 for box in boxes}) == 1 and boxes[0].x1 < boxes[1].x0 < boxes[2].x0
    assert curves.axes[0].get_ylabel() == "R²"
    assert curves.texts[0].get_window_extent().x1 < curves.legends[0].get_window_extent().x0
    strips = pictures.draw(rows, accuracies, title)
    FigureCanvasAgg(strips).draw()
    boxes = [axes.get_window_extent() for axes in strips.axes]
    assert len({box.y0 for box in boxes}) == 1 and boxes[0].x1 < boxes[1].x0 < boxes[2].x0
    assert strips.texts[0].get_window_extent().x1 < strips.bbox.x1
    assert strips.legends[0].get_window_extent().y1 < boxes[0].y0


def test_a_picture_marks_the_trained_length():
    cell = Cell("mqar:vocab_size=64", "cat", 16, 32)
    runs = [Run("MQAR", "d = 16", "cat", cell, across="lengths")]
    runs += [replace(runs[0], cell=replace(cell, layers=2))]
    rows = [(run, {"layers": run.cell.layers or 1}) for run in runs]
    drawing = pictures.draw(rows, lambda *_: {16: 0.5, 32: 1.0}, "")
    (axes,) = drawing.axes
    assert [list(x.get_xdata()) for x in axes.lines][1:] == [[32, 32]]
    labels = [text.get_text() for text in drawing.legends[0].get_texts()]
    assert labels == ["cat", "every run (line: the mean)", "trained length"]  # layers differ


def test_a_picture_has_how_far_one_token_goes_in_panels_of_bigrams():
    cell = Cell("mqar:vocab_size=64", "cat", 16, 32)
    single = Run("MQAR", "d = 16", "cat", cell, across="lengths")
    bigram = replace(single, row="hard MQNAR")
    ceilings = {"MQAR": {}, "hard MQNAR": {16: 0.75, 64: 0.25}}
    rows = [(run, {"layers": 1}) for run in (single, bigram)]

    def ceiling(run, record):
        return ceilings[run.row]

    def drawn():
        return pictures.draw(rows, lambda *_: {16: 0.5, 64: 1.0}, "", ceiling, "width")

    first, second = drawn().axes
    (line,) = (x for x in second.lines if 0.75 in x.get_ydata())
    assert list(line.get_xdata()) == [16, 64] and list(line.get_ydata()) == [0.75, 0.25]
    assert len(first.lines) == len(second.lines) - 1
    assert second.get_xlabel() == "model width"
    told = [text.get_text() for text in drawn().legends[0].get_texts()]
    assert "one token matched alone" in told
    ceilings["hard MQNAR"] = {64: 0.25}  # one length: across the panel
    assert any(list(x.get_ydata()) == [0.25, 0.25] for x in drawn().axes[1].lines)
    ceilings["hard MQNAR"] = {}
    told = [text.get_text() for text in drawn().legends[0].get_texts()]
    assert "one token matched alone" not in told
