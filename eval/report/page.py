"""Make the report's page: one HTML file with its style and drawings in it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure

from cat_lm.config import changed_values
from eval.common.html import render
from eval.common.runs import Run, curves, unigram_loss
from eval.common.style import run_colour, short_count
from eval.report.figures import loss_figure
from eval.report.parts import drawn, model_words, number, unlike
from eval.report.sections import (
    filters_section,
    lengths_section,
    missing_export,
    samples_section,
    table2_section,
)

# By which a page is known as one of ours.
GENERATOR = "cat_lm eval.report"
TEMPLATES = Path(__file__).with_name("templates")


def page(
    runs: Sequence[Run],
    summary: Sequence[dict[str, Any]],
    rows: Sequence[dict[str, Any]],
    title: str | None,
    made: dict[str, Any],
) -> str:
    """Make the whole page.

    Args:
        summary: `final_numbers` of each run.
        rows: of the length sweeps.
        made: this report's provenance.
    """
    return render(
        TEMPLATES / "report.html",
        title=title or ("Training report: " + ", ".join(run.label for run in runs)),
        generator=GENERATOR,
        colour=run_colour,
        lede=_lede(runs, summary),
        results=_results(runs, summary),
        learning=_learning(runs),
        table2=table2_section(runs),
        lengths=lengths_section(runs, rows),
        filters=filters_section(runs),
        samples=samples_section(runs),
        configuration=_configuration(runs),
        origin=_origin(runs, made),
    )


def table2_page(runs: Sequence[Run]) -> str:
    """Make a page of the paper's Table 2 alone."""
    return render(
        TEMPLATES / "table2.html",
        title="Table 2",
        generator=GENERATOR,
        colour=run_colour,
        table2=table2_section(runs),
    )


def _lede(runs: Sequence[Run], summary: Sequence[dict[str, Any]]) -> str:
    what = "One model" if len(runs) == 1 else f"{len(runs)} models"
    sizes = sorted({row["parameters"] for row in summary if row["parameters"]})
    if sizes:
        short = list(dict.fromkeys(short_count(size) for size in sizes))
        what += f" of {' to '.join(dict.fromkeys([short[0], short[-1]]))} parameters"
    budgets = sorted({run.tokens for run in runs})
    each = "" if len(runs) == 1 else ", each"
    amount = " to ".join(dict.fromkeys(short_count(x) for x in (budgets[0], budgets[-1])))
    kinds = {m["source"]["kind"] for run in runs for m in run.manifests.values()}
    source = f" of {', '.join(sorted(kinds))}" if all(run.manifests for run in runs) else ""
    lengths = ", ".join(f"{n:,}" for n in sorted({run.config.data.context_length for run in runs}))
    text = f"{what}{each} trained on {amount} tokens{source} at context length {lengths}."
    scored = [row for row in summary if row["val_loss"] is not None]
    diverged = [run.label for run in runs if run.diverged]
    if diverged:
        text += f" Diverged: {', '.join(diverged)}."
    if not scored:
        return text if diverged else text + " No validation was made."
    if unlike(runs):
        return f"{text} Why their held-out losses are not compared is said below the table."
    best = min(scored, key=lambda row: row["val_loss"])
    subject = "Held-out loss" if len(runs) == 1 else f"Lowest held-out loss: {best['run']},"
    text += (
        f" {subject} {best['val_loss']:.3f} nats per token "
        f"(perplexity {number(best['val_perplexity'])}, "
        f"{best['val_bits_per_byte']:.3f} bits per byte)"
    )
    reference = unigram_loss(runs)
    return text + (f"; a unigram model's is {reference:.2f}." if reference else ".")


def _results(runs: Sequence[Run], summary: Sequence[dict[str, Any]]) -> dict[str, Any]:
    columns: list[tuple[str, tuple[str, str], Callable[[Any], str], Callable | None]] = [
        ("val_loss", ("held-out loss", "nats per token"), "{:.4f}".format, min),
        ("val_perplexity", ("perplexity", "per token"), number, min),
        ("val_bits_per_byte", ("bits", "per byte"), "{:.4f}".format, min),
        ("parameters", ("parameters", ""), "{:,}".format, None),
        ("tokens", ("tokens", ""), short_count, None),
        ("tokens_per_second", ("training", "tokens/s"), "{:,.0f}".format, None),
    ]
    comparable = len(runs) > 1 and not unlike(runs)
    lines = []
    for run, row in zip(runs, summary, strict=True):
        cells = []
        for key, _, show, better in columns:
            value = row[key]
            known = [r[key] for r in summary if r[key] is not None]
            best = better and comparable and value is not None and value == better(known)
            absent = "n/a (diverged)" if run.diverged and key == "val_loss" else "n/a"
            cells.append({"text": absent if value is None else show(value), "best": best})
        lines.append({"label": run.label, "model": model_words(run), "cells": cells})
    reference = unigram_loss(runs)
    shown = reference is not None and [f"{reference:.4f}", number(math.exp(reference))]
    return {
        "columns": [head for _, head, _, _ in columns],
        "lines": lines,
        "reference": [*shown, *[""] * (len(columns) - 2)] if shown else None,
        "notes": _notes(runs),
        "todos": [missing_export(runs)],
    }


def _notes(runs: Sequence[Run]) -> list[str]:
    notes = []
    if reasons := unlike(runs):
        notes.append(f"No value is marked as the best. {' '.join(reasons)}")
    elif len(runs) > 1:
        notes.append("Best values are bold. One seed each: small differences are not findings.")
    # A run that was stopped may have gone on after its last validation.
    if len({(run.tokens, run.final.get("tokens", run.tokens)) for run in runs}) > 1:
        notes.append("The runs were not trained on equally many tokens.")
    skipped = [f"{run.label}: {run.skipped}" for run in runs if run.skipped]
    if skipped:
        notes.append(f"Steps skipped because of a non-finite loss: {', '.join(skipped)}.")
    return notes


def _learning(runs: Sequence[Run]) -> dict[str, Any]:
    reference = unigram_loss(runs)

    def draw(size: tuple[float, float]) -> Figure:
        return loss_figure(curves(runs), reference, size)

    caption = "Points: loss on the held-out split. Thin lines: training loss, a running mean."
    if reference is not None:
        caption += " Dashed: what a unigram model reaches; the first steps may be cut off."
    return drawn(draw, "loss", caption)


def _configuration(runs: Sequence[Run]) -> dict[str, Any]:
    dumps = [run.config.model_dump(mode="json") for run in runs]
    names = [name for dump in dumps[1:] for name in changed_values(dumps[0], dump)]
    names = [name for name in dict.fromkeys(names) if name != "train.output_dir"]
    labels = [run.label for run in runs]
    texts = [yaml.safe_dump(dump, sort_keys=False) for dump in dumps]
    return {
        "labels": labels,
        "differing": [(name, [_lookup(dump, name) for dump in dumps]) for name in names],
        "whole": list(zip(labels, texts, strict=True)),
    }


def _origin(runs: Sequence[Run], made: dict[str, Any]) -> dict[str, Any]:
    commands = []
    for run in runs:
        folder = shlex.quote(str(run.folder))
        commands.append(f"python train.py {folder}/config.yaml train.output_dir=NEW")
        if run.export:
            commands.append(f"python -m cat_lm.export {folder} {folder}/model")
    evaluations = [run.sweep.get("command") for run in runs]
    commands += dict.fromkeys([*filter(None, evaluations), made["command"]])
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    facts = {"made": made["date"], "machine": made["machine"], "versions": versions}
    return {"commands": commands, "facts": list((facts | _data_facts(runs)).items())}


def _data_facts(runs: Sequence[Run]) -> dict[str, str]:
    """Return what the runs were trained on, as far as it is known."""
    facts = {}
    for name, manifest in {n: m for run in runs for n, m in run.manifests.items()}.items():
        train = manifest["splits"]["train"]
        facts[f"data {name}"] = (
            f"{train['documents']:,} documents, {train['tokens']:,} training tokens, "
            f"fingerprint {manifest['fingerprint'][:16]}"
        )
    elsewhere: dict[str, list[str]] = {}
    for run in runs:
        if not run.manifests:
            place = " and ".join(run.config.data.folders)
            known = run.data and f"fingerprint {run.data[:16]}; not found in {place}"
            elsewhere.setdefault(known or "unknown", []).append(run.label)
    return facts | {f"data of {', '.join(names)}": text for text, names in elsewhere.items()}


def _lookup(values: dict[str, Any], dotted: str) -> Any:
    for part in dotted.split("."):
        values = values.get(part, {}) if isinstance(values, dict) else {}
    return values
