"""The theory's pictures: landmark trade-off, the trained filter, error against length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from eval.common.style import INK, MARKERS, MUTED, RUN_COLOURS, STYLE
from eval.recall.theory.generalization import LENGTH, Trained


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


def generalization_figure(trained: Trained) -> Figure:
    """Theorem 2: the learned filter, its distance along training, the error at other lengths."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.4, 3.2), layout="constrained")
        taps, path, error = figure.subplots(1, 3)
        lags = np.arange(len(trained.filters)) - len(trained.filters) // 2
        taps.bar(lags, trained.filters, color=RUN_COLOURS[0])
        taps.axhline(2, color=MUTED, linestyle=":", linewidth=1)
        taps.set_xlabel("lag")
        taps.set_title("value filter (2D₋₁: 2 at −1)", loc="left")
        unit = [LENGTH * s.error / trained.delta for s in trained.snapshots]
        path.loglog(unit, [s.to_twice for s in trained.snapshots], marker="o", label="2D₋₁")
        path.loglog(unit, [s.to_once for s in trained.snapshots], marker="s", label="D₋₁")
        path.set_xlabel("L ε₀ along training")
        path.set_title("L1 distance of the filter to", loc="left")
        path.legend()
        lengths = list(trained.by_length)
        error.loglog(lengths, [v[0] for v in trained.by_length.values()], marker="o", label="error")
        error.loglog(lengths, [v[1] for v in trained.by_length.values()], marker="s", label="map")
        step = trained.snapshots[-1].error / trained.delta
        error.loglog(lengths, [n * step for n in lengths], "--", color=MUTED, label="L' ε₀")
        error.axvline(LENGTH, color=MUTED, linestyle=":", linewidth=1)
        error.set_xlabel("length L'")
        error.set_title("largest error, largest map distance", loc="left")
        error.legend()
    return figure
