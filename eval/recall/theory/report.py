"""`python -m eval.recall theory`: every claim computed, as JSON, pictures and a page."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from cat_lm.io.files import write_json, write_text
from eval.common.html import render
from eval.common.outputs import PICTURES, claim_outputs, named
from eval.common.provenance import provenance
from eval.common.style import save_figure
from eval.common.text_table import markdown_table
from eval.recall.theory import associative, copying, generalization, landmark
from eval.recall.theory.claims import Claim
from eval.recall.theory.figures import generalization_figure, landmark_figure

ROWS, TRIALS, SLOW_TRIALS = 500, 100_000, 400


def theory(out: Path, *, seed: int = 0, rows: int = ROWS, slow_trials: int = SLOW_TRIALS) -> bool:
    """Computes all claims into `out` and prints each.

    Returns:
        Whether all hold.
    """
    claim_outputs(out, "landmark_tradeoff.json", named("landmark_tradeoff", *PICTURES))
    names = ["theory.md", "theory.html", *named("theorem_2", *PICTURES)]
    claim_outputs(out, "theory.json", names)
    started = time.monotonic()
    trained: list[generalization.Trained] = []
    figures: dict[str, dict] = {}

    def second_theorem() -> list[Claim]:
        trained.append(generalization.train(seed=seed))
        return generalization.theorem_2(trained[0])

    def tradeoff() -> list[Claim]:
        figures["landmark"] = landmark.bands(TRIALS, slow_trials, seed)
        return landmark.propositions(TRIALS, slow_trials, seed)

    parts: dict[str, Callable[[], list[Claim]]] = {
        "Theorem 1": lambda: associative.theorem_1(rows),
        "Theorem 2": second_theorem,
        "Theorem 4": lambda: copying.theorem_4(rows),
        "Propositions 1 and 2": tradeoff,
    }
    claims: list[Claim] = []
    bar = tqdm(parts.items(), disable=None, unit="part")
    for name, compute in bar:
        bar.set_description(name)
        for claim in compute():
            claims.append(claim)
            tqdm.write(claim.text())
    _write(out, claims, trained[0], figures["landmark"], time.monotonic() - started)
    return all(claim.holds for claim in claims)


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
        "theorem_2": {
            "snapshots": [dataclasses.asdict(s) for s in trained.snapshots],
            "filter": trained.filters.tolist(),
            "by_length": trained.by_length,
        },
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
        cells = [claim.source, claim.statement, claim.setting, claim.measured]
        rows.append([*cells, "yes" if claim.holds else "**no**", claim.correction])
    head = ("source", "claim", "computed", "measured", "holds", "correction")
    lines.append(markdown_table(head, rows))
    lines += ["", "![d against block size](landmark_tradeoff.png)"]
    lines += ["", "![The trained layer of Theorem 2](theorem_2.png)", ""]
    return "\n".join(lines)


def page(claims: list[Claim], command: str) -> str:
    """Make the same as one HTML page beside its pictures, in the style of the reports."""
    template = Path(__file__).with_name("templates") / "theory.html"
    return render(template, title="The theory, computed", claims=claims, command=command)
