"""`python -m eval.recall theory`: every claim computed, as JSON, pictures and a page."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm

from cat_lm.core.files import write_json, write_text
from cat_lm.core.outputs import PICTURES, claim_outputs, named
from eval.common.html import render
from eval.common.provenance import provenance
from eval.common.style import save_figure
from eval.common.text_table import markdown_table
from eval.recall.theory import (
    associative,
    copying,
    generalization,
    landmark,
    landmark_claims,
    ngram,
    state_space,
    width,
)
from eval.recall.theory.claims import Claim
from eval.recall.theory.figures import generalization_figure, landmark_figure
from eval.recall.theory.two_sided import Problem

ROWS, TRIALS, SLOW_TRIALS = 500, 100_000, 400
TRAINING_ROWS, TABLES = 200, 5
_SEEDS = 2**62  # that torch's generators and numpy's take, with room for what is added to them


def theory(
    out: Path, *, seed: int = 0, rows: int = ROWS, slow_trials: int = SLOW_TRIALS
) -> list[str]:
    """Computes all claims with their controls into `out` and prints each.

    Returns:
        The sources of claims that do not hold or have a control that passes.
    """
    claim_outputs(out, "landmark_tradeoff.json", named("landmark_tradeoff", *PICTURES))
    names = ["theory.md", "theory.html", *named("theorem_2", *PICTURES)]
    claim_outputs(out, "theory.json", names)
    started = time.monotonic()
    trained: list[generalization.Trained] = []

    def second_theorem() -> list[Claim]:
        found = generalization.trained(
            _seeded(generalization.PROBLEMS, seed),
            generalization.LENGTHS,
            TRAINING_ROWS,
            generalization.distance_unit,
        )
        trained.append(found)
        return generalization.theorem_2(found)

    def third_proposition() -> list[Claim]:
        problems = _seeded(ngram.PROBLEMS, seed)
        found = generalization.trained(problems, ngram.LENGTHS, TRAINING_ROWS, ngram.unit)
        return [ngram.lemma_2(TABLES, seed), *ngram.proposition_3(found)]

    parts: dict[str, Callable[[], list[Claim]]] = {
        "Theorem 1": lambda: associative.theorem_1(rows, seed),
        "Theorem 2": second_theorem,
        "Proposition 3": third_proposition,
        "Theorem 4": lambda: copying.theorem_4(rows, seed),
        "Propositions 1 and 2": lambda: landmark_claims.propositions(TRIALS, slow_trials, seed),
        "Propositions 4 and 5": lambda: width.general_sets(slow_trials, seed),
        "LaS Theorem B.1": lambda: state_space.theorem_b1(rows, seed),
    }
    claims: list[Claim] = []
    bar = tqdm(parts.items(), disable=None, unit="part")
    for name, compute in bar:
        bar.set_description(name)
        for claim in compute():
            claims.append(claim)
            tqdm.write(claim.text())
    bands = landmark.bands(TRIALS, slow_trials, seed)
    _write(out, claims, trained[0], bands, time.monotonic() - started)
    return [claim.source for claim in claims if not claim.stands]


def _seeded(problems: Sequence[Problem], seed: int) -> tuple[Problem, ...]:
    """The problems with other embeddings, starts and sequences for every seed of the command."""
    return tuple(dataclasses.replace(p, seed=(p.seed + 100 * seed) % _SEEDS) for p in problems)


def landmark_tradeoff(out: Path, trials: int, seed: int = 0) -> None:
    """The landmark figure alone: landmark_tradeoff.json, .png and .svg."""
    claim_outputs(out, "landmark_tradeoff.json", named("landmark_tradeoff", *PICTURES))
    bands, curves = landmark.bands(TRIALS, trials, seed), landmark.formula_curves()
    save_figure(landmark_figure(bands, curves), out / "landmark_tradeoff")
    record = {"length": landmark.LENGTH, "bands": bands, "curves": curves}
    write_json(out / "landmark_tradeoff.json", record | {"provenance": provenance()})


def _write(
    out: Path,
    claims: list[Claim],
    trained: generalization.Trained,
    bands: dict[str, list[dict[str, float]]],
    seconds: float,
) -> None:
    curves = landmark.formula_curves()
    save_figure(landmark_figure(bands, curves), out / "landmark_tradeoff")
    save_figure(generalization_figure(trained), out / "theorem_2")
    made = provenance()
    record = {
        "claims": [dataclasses.asdict(claim) for claim in claims],
        "landmark_tradeoff": {"length": landmark.LENGTH, "bands": bands, "curves": curves},
        "theorem_2": [
            {**dataclasses.asdict(case), "filter": run.kept[-1].filters.tolist()}
            for run, case in zip(trained.runs, trained.cases, strict=True)
        ],
        "seconds": round(seconds, 1),
        "provenance": made,
    }
    write_json(out / "theory.json", record)
    write_text(out / "theory.md", markdown(claims, made["command"]))
    write_text(out / "theory.html", page(claims, made["command"]))


def markdown(claims: list[Claim], command: str) -> str:
    """The table of claims with the pictures, in Markdown."""
    lines = ["# The theory, computed", "", f"`{command}`", ""]
    rows = []
    for claim in claims:
        cells = [claim.source, claim.statement, claim.setting, claim.measured, _mark(claim.holds)]
        for control in claim.controls:
            refused = [control.what, control.measured, _mark(control.fails)]
            rows.append([*cells, *refused, claim.correction if cells[0] else ""])
            cells = [""] * len(cells)
    head = ("source", "claim", "computed", "measured", "claim holds", "control")
    head += ("control measured", "control fails", "correction")
    lines.append(markdown_table(head, rows))
    lines += ["", "![d against block size](landmark_tradeoff.png)"]
    lines += ["", "![The trained layer of Theorem 2](theorem_2.png)", ""]
    return "\n".join(lines)


def _mark(good: bool) -> str:
    return "yes" if good else "**no**"


def page(claims: list[Claim], command: str) -> str:
    """Make the same as one HTML page beside its pictures, in the style of the reports."""
    template = Path(__file__).with_name("templates") / "theory.html"
    return render(template, title="The theory, computed", claims=claims, command=command)
