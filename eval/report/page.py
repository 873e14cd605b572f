"""Make the report's page: one HTML file with its style and drawings in it.

Each section of the page has a function here that gathers what its template shows.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure

from cat_lm.config import changed_values
from eval.common.filters import own_taps
from eval.common.html import render
from eval.common.runs import Run, curves, unigram_loss
from eval.common.style import NARROW, WIDE, page_svg, run_colour, short_count
from eval.length_sweep.figures import has_error_bars, length_figure, position_figure
from eval.report import table2
from eval.report.figures import filters_figure, loss_figure, views

# The generator that marks a page as a report of this command.
GENERATOR = "cat_lm eval.report"
TEMPLATES = Path(__file__).with_name("templates")
# A section's `todos` are texts with the commands that make what each says is missing.
OUTDATED = "Not shown, as measured on other weights than the present export's; to measure anew"


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
        rows: rows of the length sweeps.
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
        table2=_table2(runs),
        lengths=_lengths(runs, rows),
        filters=[(run.label, _filters(run)) for run in runs if run.filters],
        samples=_samples(runs),
        configuration=_configuration(runs),
        origin=_origin(runs, made),
    )


def table2_page(runs: Sequence[Run]) -> str:
    """Make a page of the paper's Table 2 only."""
    about = {"title": "Table 2", "generator": GENERATOR, "colour": run_colour}
    return render(TEMPLATES / "table2.html", table2=_table2(runs), **about)


def _drawn(
    draw: Callable[[tuple[float, float]], Figure], name: str, caption: str, warning: str = ""
) -> dict[str, Any]:
    """Draw a figure twice; the style shows the one that suits the screen's width.

    Args:
        warning: part of the caption to emphasize.
    """
    wide, narrow = (
        page_svg(draw(size), f"{name}-{kind}", name) for kind, size in (("w", WIDE), ("n", NARROW))
    )
    return {"wide": wide, "narrow": narrow, "caption": caption, "warning": warning}


def _number(value: float | None) -> str:
    """Show four digits or so: 1.234, 12.34, 123.4, 1,234."""
    if value is None:
        return "n/a"
    places = next((n for limit, n in ((10, 3), (100, 2), (1000, 1)) if value < limit), 0)
    return f"{value:,.{places}f}"


def _command(module: str, run: Run, more: str = "") -> str:
    folder = shlex.quote(str(run.folder))
    return f"python -m {module} {folder}{more.replace('RUN', folder)}"


def _grouped(
    runs: Sequence[Run], value_of: Callable[[Run], Any], show: Callable[[Any], str]
) -> list[str]:
    """Return each value with the labels of the runs that have it."""
    labels: dict[Any, list[str]] = {}
    for run in runs:
        labels.setdefault(value_of(run), []).append(run.label)
    return [f"{show(value)} ({', '.join(names)})" for value, names in labels.items()]


def loss_caveats(runs: Sequence[Run]) -> list[str]:
    """Return why the runs' losses do not measure their models; empty where they do."""
    data = {run.data for run in runs}
    sure = "Not" if len(data - {None}) > 1 else "Not known to be"
    by_length = sorted(runs, key=lambda run: run.config.data.context_length)
    checks = [
        (
            f"{sure} trained on the same data, by fingerprint",
            _grouped(runs, lambda run: run.data, lambda key: key[:16] if key else "unknown"),
        ),
        (
            "Not trained at one context length",
            _grouped(by_length, lambda run: run.config.data.context_length, "{:,} tokens".format),
        ),
        (
            "Perhaps not scored on as much held-out text",
            _grouped(runs, _most_scored, lambda n: f"{n:,} tokens" if n else "no limit"),
        ),
        (
            "Documents of a window are not read alike",
            _grouped(
                runs,
                lambda run: run.config.data.mask_documents,
                lambda is_masked: "apart" if is_masked else "joined",
            ),
        ),
    ]
    is_unknown = None in data and len(runs) > 1
    return [
        f"{reason}: {'; '.join(values)}."
        for number, (reason, values) in enumerate(checks)
        if len(values) > 1 or (number == 0 and is_unknown)
    ]


def _most_scored(run: Run) -> int | None:
    """Return the most tokens of held-out text that are scored, in whole windows; None for all."""
    asked, length = run.config.validation.max_tokens, run.config.data.context_length
    return None if asked is None else max(1, asked // length) * length


def _lede(runs: Sequence[Run], summary: Sequence[dict[str, Any]]) -> str:
    def ends(counts: Sequence[int]) -> str:
        return " to ".join(dict.fromkeys(short_count(n) for n in (min(counts), max(counts))))

    text = "One model" if len(runs) == 1 else f"{len(runs)} models"
    if sizes := [row["parameters"] for row in summary if row["parameters"]]:
        text += f" of {ends(sizes)} parameters"
    each = "" if len(runs) == 1 else ", each"
    kinds = {m["source"]["kind"] for run in runs for m in run.manifests.values()}
    source = f" of {', '.join(sorted(kinds))}" if all(run.manifests for run in runs) else ""
    lengths = ", ".join(f"{n:,}" for n in sorted({run.config.data.context_length for run in runs}))
    text += f"{each} trained on {ends([run.tokens for run in runs])} tokens{source}"
    text += f" at context length {lengths}."
    scored = [row for row in summary if row["val_loss"] is not None]
    diverged = [run.label for run in runs if run.diverged]
    if diverged:
        text += f" Diverged: {', '.join(diverged)}."
    if not scored:
        return text if diverged else text + " No validation was made."
    if loss_caveats(runs):
        return f"{text} Why their held-out losses are not compared is said below the table."
    best = min(scored, key=lambda row: row["val_loss"])
    subject = "Held-out loss" if len(runs) == 1 else f"Lowest held-out loss: {best['run']},"
    text += (
        f" {subject} {best['val_loss']:.3f} nats per token "
        f"(perplexity {_number(best['val_perplexity'])}, "
        f"{best['val_bits_per_byte']:.3f} bits per byte)"
    )
    reference = unigram_loss(runs)
    return text + (f"; a unigram model's is {reference:.2f}." if reference else ".")


def _results(runs: Sequence[Run], summary: Sequence[dict[str, Any]]) -> dict[str, Any]:
    columns: list[tuple[str, tuple[str, str], Callable[[Any], str], bool]] = [
        ("val_loss", ("held-out loss", "nats per token"), "{:.4f}".format, True),
        ("val_perplexity", ("perplexity", "per token"), _number, True),
        ("val_bits_per_byte", ("bits", "per byte"), "{:.4f}".format, True),
        ("parameters", ("parameters", ""), "{:,}".format, False),
        ("tokens", ("tokens", ""), short_count, False),
        ("tokens_per_second", ("training", "tokens/s"), "{:,.0f}".format, False),
    ]
    comparable = len(runs) > 1 and not loss_caveats(runs)
    lines = []
    for run, row in zip(runs, summary, strict=True):
        cells = []
        for key, _, show, is_ranked in columns:
            value = row[key]
            known = [r[key] for r in summary if r[key] is not None]
            best = is_ranked and comparable and value is not None and value == min(known)
            absent = "n/a (diverged)" if run.diverged and key == "val_loss" else "n/a"
            cells.append({"text": absent if value is None else show(value), "best": best})
        model = run.config.architecture.summary(run.config.model).words
        lines.append({"label": run.label, "model": model, "cells": cells})
    shown, reference = None, unigram_loss(runs)
    if reference is not None:
        shown = [f"{reference:.4f}", _number(math.exp(reference)), *[""] * (len(columns) - 2)]
    missing = [_command("cat_lm.export", run, " RUN/model") for run in runs if not run.export]
    return {
        "columns": [head for _, head, _, _ in columns],
        "lines": lines,
        "reference": shown,
        "notes": _notes(runs),
        "todos": [("Not exported yet, so without evaluation and filters", missing)],
    }


def _notes(runs: Sequence[Run]) -> list[str]:
    notes = []
    if reasons := loss_caveats(runs):
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
    caption = "Points: loss on the held-out split. Thin lines: training loss, a running mean."
    if reference is not None:
        caption += " Dashed: what a unigram model reaches; the first steps may be cut off."
    return _drawn(lambda size: loss_figure(curves(runs), reference, size), "loss", caption)


def _table2(runs: Sequence[Run]) -> dict[str, Any]:
    ours = table2.own_rows(runs)
    is_whole = ours[list(table2.COLUMNS[:-1])].notna().all(axis=1)
    outdated = [run for run in runs if "zero_shot" in run.outdated]
    missing = [
        r for r, whole in zip(runs, is_whole, strict=True) if not whole and r not in outdated
    ]
    is_measured = ours[list(table2.COLUMNS)].notna().any(axis=None)

    def commands(runs: Sequence[Run]) -> list[str]:
        return [_command("eval.zero_shot", run, " --tasks table2") for run in runs]

    return {
        "heads": list(table2.HEADS.values()),
        "groups": table2.groups(ours, table2.paper_rows()) if is_measured else [],
        "note": table2.NOTE,
        "warnings": table2.warnings(runs),
        "todos": [
            (OUTDATED, commands(outdated)),
            ("Not measured, or not all of it", commands(missing)),
        ],
    }


def _lengths(runs: Sequence[Run], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Gather Figure 1 of the paper with these runs, its numbers, and loss by position."""
    outdated = [run for run in runs if "sweep" in run.outdated]
    absent = [run for run in runs if not run.sweep and run not in outdated]
    strangers = ", ".join(
        f"{run.label} ({', '.join(run.strangers)})" for run in runs if run.strangers and run.sweep
    )
    note = f"Left out: rows of other weights in the sweeps of {strangers}." if strangers else ""
    return {
        "figures": _length_figures(runs, rows) if rows else [],
        "columns": sorted({row["length"] for row in rows}),
        "lines": _length_lines(runs, rows),
        "strangers": note,
        "todos": [
            (OUTDATED, [_sweep_command(run) for run in outdated]),
            ("Not measured", [_sweep_command(run) for run in absent]),
        ],
    }


def _length_figures(runs: Sequence[Run], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    labels = [run.label for run in runs]
    row = rows[0]
    sweep = next(run.sweep for run in runs if run.sweep)
    caption = (
        f"{row['tokens']:,} tokens of {sweep['text']}, the same ones at every length, each scored "
        f"once (windows: {sweep['protocol']['windows']}). Dashed: the length of training. "
    )
    if has_error_bars(rows):
        caption += f"Bars: one standard error over {row['groups']:,} {row['group_kind']}."
    else:
        caption += f"Too few {row['group_kind']} ({row['groups']}) for error bars."
    warning = _length_warning(rows)
    figures = [_drawn(lambda size: length_figure(rows, size, labels), "lengths", caption, warning)]
    # One line a run: the methods would hide each other.
    plain = [row for row in rows if row["method"] == "none" and row["positions"]]
    if plain:
        caption = (
            "Loss by how many tokens of the window were seen before, in windows of "
            f"{max(row['length'] for row in plain):,}; positions not scaled."
        )
        figures.append(_drawn(lambda size: position_figure(plain, size), "positions", caption))
    return figures


def _length_warning(rows: Sequence[dict[str, Any]]) -> str:
    """Return what makes lines that are drawn together no measurements of the same; "" for none."""

    def differ(rows: Sequence[dict[str, Any]], keys: Sequence[str], *cell: str) -> bool:
        cells = {tuple(row[key] for key in cell) for row in rows}
        return len({tuple(row[key] for key in (*cell, *keys)) for row in rows}) > len(cells)

    # With other methods the scope of the temperature has an effect.
    warm = [row for row in rows if row["method"] not in ("none", "pi")]
    differing = {
        "on different tokens": differ(rows, ["tokens_sha256"]),
        "in different windows": differ(rows, ["stride", "documents"], "length"),
        "in different arithmetic (dtype)": differ(rows, ["dtype"], "length"),
        "with different scaling factors": differ(rows, ["factor"], "length", "method"),
        "with different temperature scopes": differ(
            warm, ["temperature_scope"], "length", "method"
        ),
    }
    said = [part for part, is_so in differing.items() if is_so]
    first = f"{', '.join(said[:-1])} and " if said[1:] else ""
    return f"The runs were scored {first}{said[-1]}." if said else ""


def _sweep_command(run: Run) -> str:
    trained = run.config.data.context_length
    lengths = ",".join(str(max(1, int(trained * factor))) for factor in (0.5, 1, 2, 4, 8))
    folder, data = (shlex.quote(str(x)) for x in (run.folder, run.config.data.folders[0]))
    return (
        f"python -m eval.length_sweep {folder} --data {data} --lengths {lengths} --methods all "
        f"--out {folder}/eval"
    )


def _length_lines(runs: Sequence[Run], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    lengths = sorted({row["length"] for row in rows})
    found = {(row["label"], row["method"], row["length"]): row for row in rows}
    lines = []
    for index, run in enumerate(runs):
        methods = list(dict.fromkeys(r["method"] for r in rows if r["label"] == run.label))
        for method in methods:
            plain = method == "none"
            of_length = [found.get((run.label, method, length)) for length in lengths]
            cells = [
                {
                    "perplexity": _number(row["perplexity"]) if row else "",
                    "bits": _number(row["bits_per_byte"]) if row and plain else "",
                }
                for row in of_length
            ]
            line = {"index": index, "plain": plain, "name": run.label if plain else method}
            lines.append(line | {"more": method != methods[-1], "cells": cells})
    return lines


def _filters(run: Run) -> dict[str, Any]:
    filters, shown = run.filters, views(run.filters)
    first = {stream: float(taps[..., 0].mean()) for stream, taps in own_taps(filters).items()}
    means = ", ".join(f"{value:.2f} ({stream})" for stream, value in first.items())
    caption = (
        "Each row is a head, layers from top to bottom; lag 0 is the token itself. The colours end "
        f"at the largest tap behind lag 0 ({shown[0].limit:.3f}); lag 0 is mostly beyond them, on "
        f"average {means}."
    )
    if filters.kind.mixes_heads:
        caption += (
            " Below, how much each head (row) takes from each head (column): the norm of the taps "
            f"over all lags; the colours end at the largest between different heads "
            f"({shown[1].limit:.3f})."
        )
    if "D" in filters.kind.filter_axes:
        caption += (
            " Every channel has a filter of its own: above their mean in a head, below how far "
            "the channels differ."
        )
    caption = f"{caption} {filters.left_out}".rstrip()
    return _drawn(lambda size: filters_figure(filters, size), f"filters-{run.label}", caption)


def _samples(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Gather what the models wrote after held-out beginnings; None where there is nothing."""
    shown = [(index, run) for index, run in enumerate(runs) if run.samples]
    outdated = [_command("eval.samples", run) for run in runs if "samples" in run.outdated]
    if not shown and not outdated:
        return None
    documents: dict[str, dict[str, Any]] = {}
    for index, run in shown:
        for sample in run.samples["samples"]:
            prompt = sample["prompt"]
            document = documents.setdefault(prompt, {"prompt": prompt, "cards": []})
            document["reference"] = sample["reference"]
            card = {"index": index, "label": run.label, "text": sample["continuation"]}
            document["cards"].append(card)
    return {
        "options": shown[0][1].samples if shown else {},
        "documents": list(documents.values()),
        "todos": [(OUTDATED, outdated)],
    }


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


def _lookup(values: dict[str, Any], dotted: str) -> Any:
    for part in dotted.split("."):
        values = values.get(part, {}) if isinstance(values, dict) else {}
    return values


def _origin(runs: Sequence[Run], made: dict[str, Any]) -> dict[str, Any]:
    commands = []
    for run in runs:
        folder = shlex.quote(str(run.folder))
        commands.append(f"python train.py {folder}/config.yaml train.output_dir=NEW")
        if run.export:
            commands.append(_command("cat_lm.export", run, " RUN/model"))
    evaluations = [run.sweep.get("command") for run in runs]
    commands += dict.fromkeys([*filter(None, evaluations), made["command"]])
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    facts = {"made": made["date"], "machine": made["machine"], "versions": versions}
    return {"commands": commands, "facts": list((facts | _data_facts(runs)).items())}


def _data_facts(runs: Sequence[Run]) -> dict[str, str]:
    facts: dict[str, str] = {}
    for name, manifest in {n: m for run in runs for n, m in run.manifests.items()}.items():
        train = manifest["splits"]["train"]
        facts[f"data {name}"] = (
            f"{train['documents']:,} documents, {train['tokens']:,} training tokens, "
            f"fingerprint {manifest['fingerprint'][:16]}"
        )
    elsewhere: dict[str, list[str]] = {}
    for run in (run for run in runs if not run.manifests):
        place = " and ".join(run.config.data.folders)
        text = f"fingerprint {run.data[:16]}; not found in {place}" if run.data else "unknown"
        elsewhere.setdefault(text, []).append(run.label)
    return facts | {f"data of {', '.join(names)}": text for text, names in elsewhere.items()}
