"""`python -m eval.recall theory`: every claim judged, as JSON, pictures and a page."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cat_lm.core.files import write_json, write_text
from cat_lm.core.outputs import PICTURES, claim_outputs, named
from eval.common.html import render
from eval.common.provenance import provenance
from eval.common.style import save_figure
from eval.recall.theory import (
    associative,
    copying,
    generalization,
    landmark,
    query_sets,
    state_space,
)
from eval.recall.theory.claims import Claim, describe, stands
from eval.recall.theory.figures import generalization_figure, landmark_figure

ROWS, TRIALS, SLOW_TRIALS = 500, 100_000, 400
TRAINING_ROWS, TABLES = 200, 5


def theory(
    out: Path, *, seed: int = 0, rows: int = ROWS, slow_trials: int = SLOW_TRIALS
) -> list[str]:
    """Judge all claims with their controls into `out` and print each.

    Returns:
        The sources of claims that do not hold or have a control that passes.
    """
    claim_outputs(out, "landmark_tradeoff.json", named("landmark_tradeoff", *PICTURES))
    claim_outputs(out, "theory.json", ["theory.md", *named("theorem_2", *PICTURES)])
    started, judged = time.monotonic(), []
    layers = generalization.trained(
        generalization.PROBLEMS,
        generalization.LENGTHS,
        TRAINING_ROWS,
        generalization.distance_unit,
        seed,
    )
    for claim in tqdm(_claims(layers, seed, rows, slow_trials), disable=None, unit="claim"):
        judged.append(claim.judge())
        tqdm.write(describe(judged[-1]))
    save_figure(generalization_figure(layers), out / "theorem_2")
    record = {
        "claims": judged,
        "landmark_tradeoff": _draw_tradeoff(out, slow_trials, seed),
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


def _claims(
    layers: generalization.Trained, seed: int, rows: int, slow_trials: int
) -> Iterator[Claim]:
    """All claims, each simulated when it is its turn."""
    yield from associative.theorem_1(rows, seed)
    yield from generalization.theorem_2(layers)
    yield generalization.lemma_2(TABLES, seed)
    of_ngrams = generalization.trained(
        generalization.NGRAM_PROBLEMS,
        generalization.NGRAM_LENGTHS,
        TRAINING_ROWS,
        generalization.ngram_unit,
        seed,
    )
    yield from generalization.proposition_3(of_ngrams)
    yield from copying.theorem_4(rows, seed)
    yield from landmark.propositions(TRIALS, slow_trials, seed)
    yield from query_sets.general_sets(slow_trials, seed)
    yield from state_space.theorem_b1(rows, seed)


def landmark_tradeoff(out: Path, trials: int, seed: int = 0) -> None:
    """Write the landmark figure by itself: landmark_tradeoff.json, .png and .svg."""
    claim_outputs(out, "landmark_tradeoff.json", named("landmark_tradeoff", *PICTURES))
    record = _draw_tradeoff(out, trials, seed) | {"provenance": provenance()}
    write_json(out / "landmark_tradeoff.json", record)


def _draw_tradeoff(out: Path, trials: int, seed: int) -> dict[str, Any]:
    bands, curves = landmark.bands(TRIALS, trials, seed), landmark.formula_curves()
    save_figure(landmark_figure(bands, curves), out / "landmark_tradeoff")
    return {"length": landmark.LENGTH, "bands": bands, "curves": curves}


def markdown(claims: Sequence[dict[str, Any]], command: str) -> str:
    """Make the page of judged claims."""
    return render(Path(__file__).with_name("theory.md.jinja"), claims=claims, command=command)
