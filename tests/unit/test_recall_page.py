"""A figure's page and picture: every number where it belongs, and what spoils it first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from eval.recall.grids import figure as grid
from eval.recall.grids.catalog import FIGURES
from eval.recall.grids.plan import NEGATIVE, Run
from eval.recall.show import page, pictures
from eval.recall.train.trial import Cell


def control(passed: bool, accuracy: float = 0.5) -> dict:
    places = {"row": "MQAR", "column": "d = 8", "seq_len": 16, "accuracy": accuracy}
    negative = {**places, "chance": 0.1, "at_most": 0.2, "passed": passed}
    return {
        "positive": {"accuracy": accuracy, "at_least": 0.99, "passed": passed},
        "negative": [negative],
    }


def test_failed_controls_are_told():
    positive, negative = page.warnings({"controls": control(False)})
    assert "0.500" in positive and "under-trained" in positive
    assert "length 16" in negative and "0.2000" in negative
    assert not page.warnings({"controls": control(True)})


def test_lines_are_told_apart():
    names = [f"mixer{i}" for i in range(12)]
    looks = [pictures._style(i, name) for i, name in enumerate(names)]
    looks.append(pictures._style(12, NEGATIVE))
    keys = ("color", "linestyle", "marker", "markerfacecolor")
    assert len({tuple(look.get(key) for key in keys) for look in looks}) == 13
    assert len({(look["color"], look["linestyle"]) for look in looks}) == 13


def line(mixer: str, length: int, best: float, rate: float = 0.01, row: str = "MQAR") -> dict:
    """A line whose numbers all differ, with one run more at the least rate."""
    values = {"mean": best - 0.02, "min": best - 0.03, "max": best - 0.01, "best_of_all": best}
    place = {"row": row, "column": "d = 8", "mixer": mixer, "seq_len": length}
    runs = {"0.01": [best, best - 0.1], "0.1": [best]}
    return {**place, **values, "best_lr": rate, "best_lr_on_grid_edge": True, "runs": runs}


def record(lines: list[dict], **changes: object) -> dict:
    return {
        "figure": "accuracy",
        "shows": "x",
        "scale": "cpu",
        "number in the paper (AAAI / workshop / arXiv)": "5 / 3 / 5",
        "lines": lines,
        "fixed_items": [],
        "filters": [],
        "controls": control(True, 0.1),
        "provenance": {"command": "run it"},
        **changes,
    }


def test_a_page_says_who_solves_the_task_and_where_the_others_end():
    lines = [line("cat", 16, 0.995), line("cat", 32, 0.991), line("mamba", 16, 1.0)]
    lines += [line("mamba", 32, 0.25, 0.1), line(NEGATIVE, 16, 0.05), line(NEGATIVE, 32, 0.05)]
    lines += [line("cat", 16, 0.5, row="MQNAR"), line("attention", 16, 1.0, row="control")]
    text = page.markdown(record(lines))
    told = [part for part in text.splitlines() if "or more at every length" in part]
    assert told == [
        "- MQAR, d = 8: 0.99 or more at every length: cat; least of the others: mamba 0.250 "
        "(length 32).",
        "- MQNAR, d = 8: 0.99 or more at every length: none; least of the others: cat 0.500 "
        "(length 16).",
    ]
    assert "filters" not in text and "under-trained" not in text


def test_every_number_of_a_line_is_in_its_column():
    lines = [line("cat", 16, 0.995), line("mamba", 32, 0.25, 0.1), line("none", 32, 0.15, 0.1)]
    lines[2]["best_lr_on_grid_edge"] = False
    text = page.markdown(record(lines, fixed_items=lines[:1]))
    rows = [row for row in text.splitlines() if row.startswith("| MQAR")]
    assert rows == [
        "| MQAR | d = 8 | `cat` | 16 | 0.9750 | 0.9650 | 0.9850 | ≤ 0.01 | 0.9950 | 3 |",
        "| MQAR | d = 8 | `mamba` | 32 | 0.2300 | 0.2200 | 0.2400 | ≥ 0.1 | 0.2500 | 3 |",
        "| MQAR | d = 8 | `none` | 32 | 0.1300 | 0.1200 | 0.1400 | 0.1 | 0.1500 | 3 |",
        "| MQAR | d = 8 | `cat` | 16 | 0.9750 | 0.9650 | 0.9850 | ≤ 0.01 | 0.9950 | 3 |",
    ]
    (head,) = {row for row in text.splitlines() if row.startswith("| task")}
    assert head == (
        "| task | width | mixer | length | mean | least | largest | best lr | best of all | runs |"
    )
    assert "In 2 of 3 rows it is the least or largest" in text
    assert text.index(head) < text.index("as many keys as in training") < text.rindex(head)


def test_both_controls_are_on_the_page():
    good, bad = control(True, 0.15)["negative"][0], control(False, 0.25)["negative"][0]
    found = {"positive": control(True, 0.995)["positive"], "negative": [good, bad, good]}
    text = page.markdown(record([line("cat", 16, 0.995)], controls=found))
    assert "four keys reach 0.9950; 0.99 or more is wanted: passed." in text
    assert "at chance in 2 of 3 places; the highest against its limit is 0.2500 at" in text
    assert "MQAR, d = 8, length 16 (chance 0.1000, limit 0.2000): **failed**." in text
    assert text.split("\n\n")[1].startswith("> **The negative control failed at MQAR")
    found = {"positive": control(False, 0.5)["positive"], "negative": [good]}
    text = page.markdown(record([line("cat", 16, 0.995)], controls=found))
    assert "0.5000; 0.99 or more is wanted: **failed**." in text
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


def test_a_picture_shows_every_run_in_its_panel_and_the_best_as_a_line():
    cell = Cell("mqar:vocab_size=64", "cat", 16, 16)
    cat = Run("MQAR", "d = 16", "cat", cell)
    runs = [(cat, 0.75), (replace(cat, cell=replace(cell, seed=1)), 0.5)]
    runs += [(replace(cat, cell=replace(cell, seq_len=64)), 0.25)]
    runs += [(replace(cat, line="mamba"), 0.375), (replace(cat, column="d = 8"), 0.125)]
    runs += [(replace(cat, row="MQNAR", line=NEGATIVE), 0.0625)]
    runs += [(replace(cat, row="control", line="attention"), 1.0)]
    rows = [(run, {"best_accuracy": y, "layers": 1 + (run.line == "mamba")}) for run, y in runs]
    drawing = pictures.draw(rows, grid.points, "a title")
    panels = {axes.get_title(loc="left"): axes for axes in drawing.axes}
    assert list(panels) == ["MQAR, d = 16", "MQAR, d = 8", "MQNAR, d = 16", "MQNAR, d = 8"]
    lines = {title: [list(x.get_ydata()) for x in axes.lines] for title, axes in panels.items()}
    assert lines == {
        "MQAR, d = 16": [[0.75, 0.25], [0.375]],
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
        "every run (line: the best)",
    ]
    assert drawing.get_suptitle() == "a title"


@pytest.mark.parametrize("name", FIGURES)
def test_a_pictures_title_stands_clear_of_its_legend(name):
    record = {"figure": name, "scale": "smoke", "positive_control": 0.125}
    title = grid.picture_title(record | {"controls": {"positive": {"passed": False}}})
    run = Run("MQAR", "d = 16", "attention:position=rope", Cell("mqar", "attention", 16, 16))
    rows = [(run, {"best_accuracy": 1.0, "layers": 2})]
    drawing = pictures.draw(rows, grid.points, f"{title}\nas many keys as trained")
    FigureCanvasAgg(drawing).draw()
    legend, (words,) = drawing.legends[0].get_window_extent(), drawing.texts
    assert "control failed (0.12)" in words.get_text()
    assert words.get_window_extent().x1 < legend.x0
    assert legend.x1 <= drawing.bbox.x1


def test_a_picture_marks_the_trained_length():
    cell = Cell("mqar:vocab_size=64", "cat", 16, 32)
    runs = [Run("MQAR", "d = 16", "cat", cell, across_tests=True)]
    runs += [replace(runs[0], cell=replace(cell, layers=2))]
    rows = [(run, {"layers": run.cell.layers or 1}) for run in runs]
    drawing = pictures.draw(rows, lambda *_: {16: 0.5, 32: 1.0}, "")
    (axes,) = drawing.axes
    assert [list(x.get_xdata()) for x in axes.lines][1:] == [[32, 32]]
    labels = [text.get_text() for text in drawing.legends[0].get_texts()]
    assert labels == ["cat", "every run (line: the best)", "trained length"]  # layers differ
