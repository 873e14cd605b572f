"""`python -m eval.recall theory`: every claim judged, as JSON, pictures and a page."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from cat_lm.core.files import write_json, write_text
from cat_lm.core.outputs import PICTURES, claim_outputs, result_files
from eval.common.html import render
from eval.common.provenance import provenance
from eval.common.style import INK, MARKERS, MUTED, RUN_COLOURS, STYLE, save_figure
from eval.recall.theory import (
    associative,
    copying,
    generalization,
    landmark,
    query_sets,
    state_space,
    two_sided,
)
from eval.recall.theory.claims import Claim, Simulations, describe, stands

TRIALS = 100_000  # number of trials of the laws for a fixed query
TRAINING_ROWS, TABLES = 200, 5


def theory(out: Path, asked: Simulations) -> list[str]:
    """Judge all claims with their controls into `out` and print each.

    Returns:
        The sources of claims that do not hold or have a control that passes.
    """
    claim_outputs(out, "landmark_tradeoff.json", result_files("landmark_tradeoff", *PICTURES))
    claim_outputs(out, "theory.json", ["theory.md", *result_files("theorem_2", *PICTURES)])
    started, judged = time.monotonic(), []
    layers = generalization.trained(
        generalization.PROBLEMS,
        generalization.LENGTHS,
        TRAINING_ROWS,
        generalization.distance_unit,
        asked.seed,
    )
    for claim in tqdm(_claims(layers, asked), disable=None, unit="claim"):
        judged.append(claim.judge())
        tqdm.write(describe(judged[-1]))
    save_figure(generalization_figure(layers), out / "theorem_2")
    record = {
        **dataclasses.asdict(asked),
        "claims": judged,
        "landmark_tradeoff": _draw_tradeoff(out, asked.trials, asked.seed),
        "theorem_2": [
            {**dataclasses.asdict(case), "filter": run.kept[-1].filters.tolist()}
            for run, case in zip(layers.runs, layers.cases, strict=True)
        ],
        "seconds": round(time.monotonic() - started, 1),
        "provenance": provenance(),
    }
    write_json(out / "theory.json", record)
    write_text(out / "theory.md", markdown(judged, record["provenance"]["command"]))
    return [found["source"] for found in judged if not stands(found)]


def _claims(layers: generalization.Trained, asked: Simulations) -> Iterator[Claim]:
    seed, rows = asked.seed, asked.rows
    yield from associative.theorem_1(rows, seed)
    yield from generalization.theorem_2(layers)
    yield generalization.lemma_2(TABLES, seed)
    of_ngrams = generalization.trained(
        generalization.NGRAM_PROBLEMS,
        generalization.NGRAM_LENGTHS,
        TRAINING_ROWS,
        generalization.ngram_unit,
        asked.seed,
    )
    yield from generalization.proposition_3(of_ngrams)
    yield from copying.theorem_4(rows, seed)
    yield from landmark.propositions(TRIALS, asked.trials, seed)
    yield from query_sets.general_sets(asked.trials, seed)
    yield from state_space.theorem_b1(rows, seed)


def landmark_tradeoff(out: Path, trials: int, seed: int = 0) -> None:
    """Write the landmark figure by itself: landmark_tradeoff.json, .png and .svg."""
    claim_outputs(out, "landmark_tradeoff.json", result_files("landmark_tradeoff", *PICTURES))
    record = _draw_tradeoff(out, trials, seed) | {"provenance": provenance()}
    write_json(out / "landmark_tradeoff.json", record)


def _draw_tradeoff(out: Path, trials: int, seed: int) -> dict[str, Any]:
    bands, curves = landmark.bands(TRIALS, trials, seed), landmark.formula_curves()
    save_figure(landmark_figure(bands, curves), out / "landmark_tradeoff")
    return {"length": landmark.LENGTH, "bands": bands, "curves": curves}


def markdown(claims: Sequence[dict[str, Any]], command: str) -> str:
    """Make the page of judged claims."""
    return render(Path(__file__).with_name("theory.md.jinja"), claims=claims, command=command)


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
            colour = RUN_COLOURS[i % len(RUN_COLOURS)]
            blocks, low, half = zip(
                *((p["block"], p["d10"], p["d50"]) for p in points), strict=True
            )
            axes.fill_between(blocks, low, half, color=colour, alpha=0.25, linewidth=0)
            axes.plot(blocks, half, color=colour, marker=MARKERS[i], label=label, linewidth=1)
            if label in curves:
                axes.plot(*zip(*curves[label], strict=True), color=colour, linestyle="--")
        axes.plot([], [], color=MUTED, linestyle="--", label="Proposition 1, t = 0")
        axes.fill_between([], [], [], color=MUTED, alpha=0.25, label="10–50% success")
        axes.set_xscale("log", base=2)
        axes.set_xticks(blocks, [str(block) for block in blocks])
        axes.set(yscale="log", xlabel="block size B", ylabel="embedding dimension d")
        axes.set_title("Landmark attention at L = 2²⁰, σ² = 1", color=INK, loc="left")
        axes.legend(fontsize=8)
    return figure


def generalization_figure(found: generalization.Trained) -> Figure:
    """Theorem 2: a trained filter, ‖F − 2D₋₁‖₁ of all over L ε₀, the error at other lengths."""
    line = {"markersize": 4, "linewidth": 1}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.6, 3.6), layout="constrained")
        taps, distance, error = figure.subplots(1, 3)
        filters = found.runs[0].kept[-1].filters.detach().numpy()
        taps.bar(np.arange(len(filters)) - len(filters) // 2, filters, color=RUN_COLOURS[0])
        taps.axhline(2, color=MUTED, linestyle=":", linewidth=1)
        taps.set_xlabel("lag")
        taps.set_title("value filter (2D₋₁: 2 at −1)", loc="left")
        for i, case in enumerate(found.cases):
            unit = [case.problem.length * case.unit * m.error for m in case.admitted]
            far = [m.filter for m in case.admitted]
            bound = [generalization.filter_bound(case, m) for m in case.admitted]
            style = {"color": RUN_COLOURS[0], "marker": "o", "label": None if i else "‖·‖₁"}
            distance.loglog(unit, far, **line, **style)
            style = {"color": MUTED, "linestyle": "--", "label": None if i else "bound D"}
            distance.loglog(unit, bound, **line, **style)
        distance.set_xlabel("L ε₀")
        distance.set_title(f"‖F_v − 2D₋₁‖₁ of {len(found.cases)} layers", loc="left")
        first = found.cases[0]
        for i, m in enumerate(first.measured):
            style = {"color": RUN_COLOURS[i], "marker": MARKERS[i], "label": f"ε = {m.error:.0e}"}
            error.loglog(*_by_length(m), **line, **style)
        for (what, cases), style in zip(found.wrong().items(), ("-", "--", ":"), strict=True):
            label = what.split(" (")[0].removeprefix("the trained layers with ")
            error.loglog(*_by_length(cases[0].measured[-1]), color=INK, ls=style, lw=1, label=label)
        error.axvline(first.problem.length, color=MUTED, linestyle=":", linewidth=1)
        error.set_xlabel("length L'")
        error.set_title("largest error", loc="left")
        distance.legend(fontsize=8)
        error.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _by_length(m: two_sided.Measured) -> tuple[list[int], list[float]]:
    return list(m.by_length), [error for error, _ in m.by_length.values()]
