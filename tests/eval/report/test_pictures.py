"""Filter portraits, and perplexity by length."""

from __future__ import annotations

import re

import numpy as np
import pytest

from eval.common.filters import Filters, own_taps, read_filters
from eval.common.runs import read_run
from eval.report.figures import filters_figure, views
from tests.eval.report.results import report


class TestFilters:
    def test_read_as_stored_and_shown_by_kind(self, runs):
        assert read_filters(runs["pythia"] / "model") is None
        shapes = {"cat": (2, 2, 4), "canon": (2, 2, 16, 4), "mh": (2, 4, 2, 2)}
        for name, shape in shapes.items():
            filters = read_filters(runs[name] / "model")
            assert list(filters.streams) == ["q", "k", "v"]
            assert filters.streams["q"].shape == shape
            assert len(views(filters)) == (1 if name == "cat" else 2)
            for view in views(filters):
                assert {v.shape[:2] for v in view.values.values()} == {(2, 2)}, "layers, heads"

    @pytest.mark.parametrize("kind", ["head", "multihead"])
    def test_keys_and_values_may_have_fewer_heads(self, kind):
        shapes = {"head": lambda h: (3, h, 5), "multihead": lambda h: (3, 5, h, h)}[kind]
        random = np.random.default_rng(0)
        streams = {s: random.normal(size=shapes(h)) for s, h in (("q", 4), ("k", 2), ("v", 2))}
        figure = filters_figure(Filters(kind, streams))
        panels = [axes for axes in figure.axes if axes.images and axes.get_title() in "qkv"]
        assert len(panels) == (3 if kind == "head" else 6)
        for axes in panels:
            heads = len(axes.images[0].get_array()) / 3
            assert heads == (4 if axes.get_title() == "q" else 2)
            assert axes.get_ylim() == (2.5, -0.5) and list(axes.get_yticks()) == [0, 1, 2]

    def test_multihead_view_is_of_the_right_pairs(self):
        taps = np.zeros((1, 3, 2, 2), dtype=np.float32)  # layers, W, H_out, H_in
        taps[0, 0] = np.eye(2)
        taps[0, 1, 0, 1], taps[0, 2, 0, 1] = 3.0, -4.0
        taps[0, 2, 1, 1] = 0.5
        filters = Filters("multihead", {"v": taps})
        own, pairs = views(filters)
        assert own.values["v"][0].tolist() == [[1, 0, 0], [1, 0, 0.5]]
        assert own.limit == 0.5
        assert pairs.values["v"][0, 0].tolist() == [1.0, 5.0], "out 0 reads 5 from head 1"
        assert pairs.values["v"][0, 1, 0] == 0.0
        assert pairs.limit == 5.0

    def test_depthwise_view_is_mean_and_spread_over_channels(self):
        taps = np.array([[[[1.0, 0.2], [1.0, 0.4]]]])  # one layer, one head, two channels
        mean, spread = views(Filters("depthwise", {"k": taps}))
        assert mean.values["k"][0, 0].tolist() == pytest.approx([1.0, 0.3])
        assert spread.values["k"][0, 0].tolist() == pytest.approx([0.0, 0.1])

    def test_window_of_one_and_every_width_can_be_drawn(self):
        for conv_type, shape in (("head", (2, 3, 1)), ("multihead", (2, 1, 3, 3))):
            filters = Filters(conv_type, {"q": np.ones(shape, dtype=np.float32)})
            assert own_taps(filters)["q"].shape == (2, 3, 1)
            for size in ((7.4, 3.7), (3.8, 3.3)):
                filters_figure(filters, size).canvas.draw()


class TestLengths:
    def test_methods_differ_by_line_and_runs_by_colour(self):
        from eval.common.style import run_colour
        from eval.length_sweep.figures import length_figure

        rows = [
            {
                **{"label": label, "method": method, "length": length, "perplexity": 20.0},
                **{"training_length": 32, "standard_error": None, "groups": 1},
            }
            for label, methods in (("a", ("none", "pi", "yarn")), ("b", ("none", "temperature")))
            for method in methods
            for length in (32, 64)
            if (method, length) != ("yarn", 64)  # a cell that did not fit into memory
        ]
        axes = length_figure(rows, order=["z", "a", "b"]).axes[0]
        lines = [
            line for line in axes.lines if len(line.get_xdata()) and line.get_marker() != "None"
        ]
        assert len(lines) == 5
        styles = [line.get_linestyle() for line in lines]
        assert len(set(styles[:3])) == 3
        assert [line.get_color() for line in lines] == [run_colour(1)] * 3 + [run_colour(2)] * 2

    def test_command_for_a_missing_sweep_is_complete(self, run, tmp_path, monkeypatch, capsys):

        assert report(monkeypatch, capsys, run, "--out", tmp_path / "out")[0] == 0
        page = (tmp_path / "out/index.html").read_text(encoding="utf-8")
        data = read_run(run).config.data.path
        assert re.search(
            rf"python -m eval.length_sweep {run} --data {data} --lengths 16,32,64,128,256 "
            rf"--methods all --out {run}/eval",
            page,
        )

    def test_a_table_of_somebody_else_s_is_not_replaced(self, run, tmp_path, monkeypatch, capsys):
        out = tmp_path / "out"
        out.mkdir()
        (out / "table2.md").write_text("mine")
        code, said = report(monkeypatch, capsys, run, "--out", out)
        assert code == 2 and f"--out {out}: table2.md is not of an earlier run" in said
        assert [path.name for path in out.iterdir()] == ["table2.md"]
        assert (out / "table2.md").read_text() == "mine"
