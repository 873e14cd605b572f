"""Gather what the report's page shows of the measurements after training."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from eval.common.filters import own_taps
from eval.common.runs import Run
from eval.length_sweep.figures import has_error_bars, length_figure, position_figure
from eval.report import table2
from eval.report.filters import filters_figure, views
from eval.report.parts import drawn, number

OUTDATED = "Not shown, as measured on other weights than the present export's; to measure anew"

# A text, and the commands that make what it says is missing.
Todo = tuple[str, list[str]]


def missing_export(runs: Sequence[Run]) -> Todo:
    """Name the runs whose weights are not exported yet."""
    return (
        "Not exported yet, so without evaluation and filters",
        [f"python -m cat_lm.export {_folder(r)} {_folder(r)}/model" for r in runs if not r.export],
    )


def table2_section(runs: Sequence[Run]) -> dict[str, Any]:
    """Gather the paper's Table 2 with the runs above its rows."""
    ours = table2.own_rows(runs)
    missing = [
        _zero_shot_command(run)
        for run, row in zip(runs, ours, strict=True)
        if any(row.values[column] is None for column in table2.COLUMNS)
        and "zero_shot" not in run.outdated
    ]
    outdated = [_zero_shot_command(run) for run in runs if "zero_shot" in run.outdated]
    measured = any(value is not None for row in ours for value in row.values.values())
    return {
        "heads": list(table2.HEADS.values()),
        "groups": table2.groups(ours, table2.paper_rows()) if measured else [],
        "note": table2.NOTE,
        "warnings": table2.warnings(ours),
        "todos": [(OUTDATED, outdated), ("Not measured, or not all of it", missing)],
    }


def _zero_shot_command(run: Run) -> str:
    return f"python -m eval.zero_shot {_folder(run)} --tasks table2"


def lengths_section(runs: Sequence[Run], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Gather Figure 1 of the paper with these runs, its numbers, and loss by position."""
    outdated = [run for run in runs if "sweep" in run.outdated]
    absent = [run for run in runs if not run.sweep and run not in outdated]
    return {
        "figures": _length_figures(runs, rows) if rows else [],
        "columns": sorted({row["length"] for row in rows}),
        "lines": _length_lines(runs, rows),
        "strangers": _strangers_note(runs),
        "todos": [
            (OUTDATED, [_sweep_command(run) for run in outdated]),
            ("Not measured", [_sweep_command(run) for run in absent]),
        ],
    }


def _length_figures(runs: Sequence[Run], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    def draw(size: tuple[float, float]) -> Figure:
        return length_figure(rows, size, order=[run.label for run in runs])

    figures = [drawn(draw, "lengths", _length_caption(runs, rows), _length_warning(rows))]
    # One line a run: the methods would hide each other.
    plain = [row for row in rows if row["method"] == "none" and row["positions"]]
    if plain:
        caption = (
            "Loss by how many tokens of the window were seen before, in windows of "
            f"{max(row['length'] for row in plain):,}; positions not scaled."
        )
        figures.append(drawn(lambda size: position_figure(plain, size), "positions", caption))
    return figures


def _length_warning(rows: Sequence[dict[str, Any]]) -> str:
    """Return what makes lines that are drawn together no measurements of the same; "" for none."""
    cell = ("length", "method")
    warm = [row for row in rows if row["method"] not in ("none", "pi")]  # the scope does something
    differing = {
        "on different tokens": _differ(rows, ("tokens_sha256",)),
        "in different windows": _differ(rows, ("stride", "documents"), ("length",)),
        "in different arithmetic (dtype)": _differ(rows, ("dtype",), ("length",)),
        "with different scaling factors": _differ(rows, ("factor",), cell),
        "with different temperature scopes": _differ(warm, ("temperature_scope",), cell),
    }
    said = [part for part, is_so in differing.items() if is_so]
    first = f"{', '.join(said[:-1])} and " if said[1:] else ""
    return f"The runs were scored {first}{said[-1]}." if said else ""


def _differ(rows: Sequence[dict[str, Any]], keys: Sequence[str], cell: Sequence[str] = ()) -> bool:
    """Return True if rows with the same values of `cell` differ in `keys`."""
    cells = {tuple(row[key] for key in cell) for row in rows}
    return len({tuple(row[key] for key in (*cell, *keys)) for row in rows}) > len(cells)


def _strangers_note(runs: Sequence[Run]) -> str:
    """Name what else lies in the runs' sweeps: rows of other models, so not of the runs."""
    parts = [
        f"{run.label} ({', '.join(run.strangers)})" for run in runs if run.strangers and run.sweep
    ]
    return f"Left out: rows of other weights in the sweeps of {', '.join(parts)}." if parts else ""


def _length_caption(runs: Sequence[Run], rows: Sequence[dict[str, Any]]) -> str:
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
    return caption


def _sweep_command(run: Run) -> str:
    trained = run.config.data.context_length
    lengths = ",".join(str(max(1, int(trained * factor))) for factor in (0.5, 1, 2, 4, 8))
    data = shlex.quote(run.config.data.folders[0])
    return (
        f"python -m eval.length_sweep {_folder(run)} --data {data} --lengths {lengths} "
        f"--methods all --out {_folder(run)}/eval"
    )


def _folder(run: Run) -> str:
    return shlex.quote(str(run.folder))


def _length_lines(runs: Sequence[Run], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    lengths = sorted({row["length"] for row in rows})
    cells = {(row["label"], row["method"], row["length"]): row for row in rows}
    lines = []
    for index, run in enumerate(runs):
        methods = list(dict.fromkeys(r["method"] for r in rows if r["label"] == run.label))
        for method in methods:
            plain = method == "none"
            found = [cells.get((run.label, method, length)) for length in lengths]
            line = {
                "index": index,
                "plain": plain,
                "name": run.label if plain else method,
                "more": method != methods[-1],
                "cells": [_length_cell(row, plain) for row in found],
            }
            lines.append(line)
    return lines


def _length_cell(row: dict[str, Any] | None, plain: bool) -> dict[str, str]:
    if row is None:
        return {"perplexity": "", "bits": ""}
    bits = number(row["bits_per_byte"]) if plain else ""
    return {"perplexity": number(row["perplexity"]), "bits": bits}


def samples_section(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Gather what the models wrote after held-out beginnings; None where there is nothing."""
    shown = [(index, run) for index, run in enumerate(runs) if run.samples]
    outdated = [f"python -m eval.samples {_folder(r)}" for r in runs if "samples" in r.outdated]
    if not shown and not outdated:
        return None
    prompts = dict.fromkeys(s["prompt"] for _, run in shown for s in run.samples["samples"])
    return {
        "options": shown[0][1].samples if shown else {},
        "documents": [_document(prompt, shown) for prompt in prompts],
        "todos": [(OUTDATED, outdated)],
    }


def _document(prompt: str, shown: Sequence[tuple[int, Run]]) -> dict[str, Any]:
    cards, reference = [], ""
    for index, run in shown:
        for sample in run.samples["samples"]:
            if sample["prompt"] == prompt:
                reference = sample["reference"]
                text = sample["continuation"]
                cards.append({"index": index, "label": run.label, "text": text})
    return {"prompt": prompt, "reference": reference, "cards": cards}


def filters_section(runs: Sequence[Run]) -> list[tuple[str, dict[str, Any]]]:
    """Draw the learned filters: (label, figure) of each run that has some."""
    found = []
    for run in runs:
        if not run.filters:
            continue

        def draw(size: tuple[float, float], run: Run = run) -> Figure:
            return filters_figure(run.filters, size)

        found.append((run.label, drawn(draw, f"filters-{run.label}", _filters_caption(run))))
    return found


def _filters_caption(run: Run) -> str:
    filters = run.filters
    first = {stream: float(taps[..., 0].mean()) for stream, taps in own_taps(filters).items()}
    means = ", ".join(f"{value:.2f} ({stream})" for stream, value in first.items())
    shown = views(filters)
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
    return f"{caption} {filters.left_out}".rstrip()
