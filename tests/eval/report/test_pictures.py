"""Filter portraits, and perplexity by length."""

from __future__ import annotations

import numpy as np
import pytest

from eval.common.filters import Filters, own_taps, read_filters
from eval.common.style import NARROW, run_colour
from eval.length_sweep.figures import length_figure
from eval.report.figures import filters_figure, loss_figure, views


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

    def test_window_of_one_can_be_drawn_narrow(self):
        filters = Filters("multihead", {"q": np.ones((2, 1, 3, 3), dtype=np.float32)})
        assert own_taps(filters)["q"].shape == (2, 3, 1)
        filters_figure(filters, NARROW).canvas.draw()


class TestLengths:
    def test_methods_differ_by_line_and_runs_by_colour(self):
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


def test_loss_picture_shows_every_validation_and_the_reference():
    def limits(validation: list[float], unigram: float | None) -> tuple[float, float]:
        steps = [(step, 9.0 - step / 50) for step in range(200)]
        runs = {"run": {"train": steps, "validation": list(enumerate(validation))}}
        return loss_figure(runs, unigram).axes[0].get_ylim()

    assert limits([6.0, 5.5], 7.0)[1] < 8.5, "the first steps are cut off"
    assert limits([8.2, 8.0], 7.0)[1] > 8.2, "a run that fails to learn is not"
    assert limits([6.0], 7.0)[0] < 5.2
    assert limits([6.0], None)[1] > 9.0
    assert limits([8.0], 4.0)[0] < 4.0, "words outside of the picture leave its axes no room"
