"""The theory's pictures: landmark trade-off, trained filters, error against length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.common.style import INK, MARKERS, MUTED, RUN_COLOURS, STYLE
from eval.recall.theory.generalization import Trained, filter_bound


def landmark_figure(
    bands: Mapping[str, Sequence[Mapping[str, float]]],
    curves: Mapping[str, Sequence[tuple[int, float]]],
) -> Figure:
    """d against block size: bands of 10–50% success, and Proposition 1's curves (dashed).

    The paper's Figure 4 (Figure 6 of the workshop version).
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.4, 4.6), layout="constrained")
        axes = figure.add_subplot()
        for i, (label, points) in enumerate(bands.items()):
            colour, blocks = RUN_COLOURS[i % len(RUN_COLOURS)], [p["block"] for p in points]
            low, half = ([p[name] for p in points] for name in ("d10", "d50"))
            axes.fill_between(blocks, low, half, color=colour, alpha=0.25, linewidth=0)
            axes.plot(blocks, half, color=colour, marker=MARKERS[i], label=label, linewidth=1)
            if label in curves:
                axes.plot(*zip(*curves[label], strict=True), color=colour, linestyle="--")
        axes.plot([], [], color=MUTED, linestyle="--", label="Proposition 1, t = 0")
        axes.fill_between([], [], [], color=MUTED, alpha=0.25, label="10–50% success")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(blocks, [str(b) for b in blocks])
        axes.set_xlabel("block size B")
        axes.set_ylabel("embedding dimension d")
        axes.set_title("Landmark attention at L = 2²⁰, σ² = 1", color=INK, loc="left")
        axes.legend(fontsize=8)
    return figure


def generalization_figure(found: Trained) -> Figure:
    """Theorem 2: a trained filter, the distance of all filters, the error at other lengths."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.6, 3.6), layout="constrained")
        taps, path, error = figure.subplots(1, 3)
        filters = found.runs[0].kept[-1].filters.detach().numpy()
        taps.bar(np.arange(len(filters)) - len(filters) // 2, filters, color=RUN_COLOURS[0])
        taps.axhline(2, color=MUTED, linestyle=":", linewidth=1)
        taps.set_xlabel("lag")
        taps.set_title("value filter (2D₋₁: 2 at −1)", loc="left")
        _distances(path, found)
        _errors(error, found)
    return figure


def _distances(axes: Axes, found: Trained) -> None:
    """‖F − 2D₋₁‖₁ and the bound, over L ε₀, where the theorem speaks."""
    for i, case in enumerate(found.cases):
        unit = [case.problem.length * case.unit * m.error for m in case.admitted]
        style = dict(color=RUN_COLOURS[0], marker="o", markersize=4, linewidth=0.8)
        axes.loglog(unit, [m.filter for m in case.admitted], **style, label=None if i else "‖·‖₁")
        style = dict(color=MUTED, linestyle="--", linewidth=1)
        bound = [filter_bound(case, m) for m in case.admitted]
        axes.loglog(unit, bound, **style, label=None if i else "bound D")
    axes.set_xlabel("L ε₀")
    axes.set_title(f"‖F_v − 2D₋₁‖₁ of {len(found.cases)} layers", loc="left")
    axes.legend(fontsize=8)


def _errors(axes: Axes, found: Trained) -> None:
    """The first layer's error by length, one line for each ε, and the layers that are wrong."""
    first = found.cases[0]
    for i, m in enumerate(first.measured):
        errors = [values[0] for values in m.by_length.values()]
        style = dict(color=RUN_COLOURS[i], marker=MARKERS[i], markersize=4, linewidth=1)
        axes.loglog(list(m.by_length), errors, **style, label=f"ε = {m.error:.0e}")
    for what, style in zip(found.wrong(), ("-", "--", ":"), strict=True):
        m = found.controls[what][0].measured[-1]
        errors = [values[0] for values in m.by_length.values()]
        label = what.split(" (")[0].removeprefix("the trained layers with ")
        axes.loglog(list(m.by_length), errors, color=INK, linestyle=style, label=label)
    axes.axvline(first.problem.length, color=MUTED, linestyle=":", linewidth=1)
    axes.set_xlabel("length L'")
    axes.set_title("largest error", loc="left")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
