"""Learned filters: the delays that are read from them, the runs that are shown, the picture."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np

from eval.lab.places import Run
from eval.recall import filter_plots as portraits
from eval.recall.cell import Cell

RUN = Run("MQAR", "d = 16", "cat", Cell("mqar:vocab_size=64", "cat", 16, 16))


def test_the_rule_is_of_one_layer_that_recalls_by_filters_of_heads():
    """Two layers that recall by another rule, pairs of heads, and copying have no verdict."""
    shifted, plain = {"v": [[0.0, 1.0]]}, {"v": [[1.0, 0.0]]}
    pairs = {"k": [[0.0, 1.0]] * 4}

    def found(mixer, filters, task=RUN.cell.task):
        run = replace(RUN, cell=replace(RUN.cell, mixer=mixer, task=task))
        (entry,) = portraits.table([(run, {"accuracy": 1.0, "filters": filters})])
        return [(head["head"], portraits.verdict(head)) for head in entry["heads"]]

    assert found("cat", [shifted]) == [(0, "no")]
    assert found("cat", [{"k": [[0.0, 1.0]]}]) == found("cat", [{"q": [[1.0]], "k": [[0.1, 2.0]]}])
    assert found("cat", [{"k": [[0.0, -2.0]]}]) == [(0, "yes")]
    assert found("cat", [{"k": [[1.0, 1.0, 1.0]]}]) == [(0, "several taps")]
    assert found("cat", [shifted, plain]) == [(0, ""), (0, "")]
    assert found("cat", [shifted], "selective-copy") == [(0, "")]
    named = [(f"{to} from {source}", "") for to in (0, 1) for source in (0, 1)]
    assert found("cat:heads=2,conv_type=multihead", [pairs]) == named


def test_the_best_run_of_each_place_is_shown_by_its_last_accuracy():
    filters = [{"k": [[0.0, 1.0]]}]
    rows = [
        (replace(RUN, cell=replace(RUN.cell, seed=seed)), {"accuracy": a, "filters": f})
        for seed, (a, f) in enumerate([(0.5, filters), (0.9, filters), (0.7, filters)])
    ]
    (entry,) = portraits.table(rows)
    assert entry["seed"] == 1 and entry["heads"][0]["delays"] == {"k": 1}
    assert not portraits.table([(RUN, {"accuracy": 1.0, "filters": []})])
    drawing = portraits.draw([entry] * 70, "many")
    assert "the first 60 of 70 heads" in drawing.get_suptitle()
    assert len(drawing.axes[0].get_yticklabels()) == 60


def test_a_picture_has_a_panel_for_each_stream_and_a_line_for_each_head():
    filters = [{"q": [[4.0, -2.0], [0.0, 1.0]], "k": [[0.0, 0.0, 8.0], [1.0, 0.0, 0.5]]}]
    (entry,) = portraits.table([(RUN, {"accuracy": 0.5, "filters": filters})])
    drawing = portraits.draw([entry], "a title")
    first, second = drawing.axes
    assert (first.get_title(), second.get_title()) == ("q", "k")
    shown = [axes.images[0].get_array().filled(np.nan) for axes in drawing.axes]
    wanted = ([[1, -0.5, np.nan], [0, 1, np.nan]], [[0, 0, 1], [1, 0, 0.5]])
    np.testing.assert_array_equal(shown, wanted)
    numbers = [[text.get_text() for text in axes.texts] for axes in drawing.axes]
    assert numbers[0] == ["4.00", "-2.00", "0.00", "1.00"] and len(numbers[1]) == 6
    names = [text.get_text() for text in first.get_yticklabels()]
    assert names == [f"MQAR, d = 16, L 16: cat, layer 0, head {head}" for head in (0, 1)]
    (right,) = second.child_axes
    # Delays 0 and 2, whose rule fails; 1 and 0 with a single tap of 0.8 of the squares.
    assert [text.get_text() for text in right.get_yticklabels()] == ["0.500  no"] * 2
    assert drawing.get_suptitle().startswith("a title\n")


def test_one_runs_portrait_stands_beside_its_file(tmp_path):
    record = {"cell": asdict(RUN.cell), "accuracy": 0.5, "filters": [{"k": [[0.0, 1.0]]}]}
    picture = portraits.save_portrait(record, tmp_path / "cat-lr0.01-seed0.json")
    assert picture == tmp_path / "cat-lr0.01-seed0-filters.png"
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {picture.name, "cat-lr0.01-seed0-filters.svg"}
    for without in ([], [{}]):
        found = portraits.save_portrait({**record, "filters": without}, tmp_path / "none.json")
        assert found is None
    assert {path.name for path in tmp_path.iterdir()} == names
