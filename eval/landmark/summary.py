"""One figure of up to four panels, and its numbers, from what other commands have written.

(i) How many needles models of `eval.recall` find, by the length of the haystack. (ii) How often a
match's block is found, against x = SNR² / (2 b ln(m / k)), over all heads, block sizes b and
numbers of blocks k: measured, and as Proposition 1's law has it. By the law's first order,
2 b ln(m / k) of SNR² are needed, so one curve should hold them all. (iii) Perplexity over dense
attention's against the keys read, by selector. (iv) A token's time after a context.

Models that differ by seed alone are one series: their names end in -0, -1 and so on, and means over
them are drawn with the least and the largest.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cat_lm.errors import UserError
from cat_lm.io.files import write_json
from cat_lm.io.readers import read_object
from cat_lm.options import parse_specification
from eval.common.outputs import PICTURES, claim_outputs, named
from eval.common.text_table import aligned

# Edges of x's bins, equal in its logarithm.
EDGES = tuple(2.0 ** (power / 2) for power in range(-10, 9))
_SEED = re.compile(r"-\d+$")


def summarise(
    out: Path | str,
    diagnoses: Sequence[Path],
    sweeps: Sequence[Path],
    contexts: Path | None,
    block: int | None,
    recall: Sequence[Path] = (),
) -> dict[str, Any]:
    """Write landmark.json, .png and .svg into `out`.

    Args:
        diagnoses, sweeps: records of `diagnose` and `sweep`.
        contexts: a record of `eval.speed decode --contexts`; None leaves panel (iv) out.
        block: of the sweeps, to be shown; None for the smallest that all have.
        recall: folders of `eval.recall run`, with cells of the task needle.

    Returns:
        What landmark.json holds: `needles`, `retrieval`, `perplexity` and `decoding`, each a list
        of points.

    Raises:
        UserError: a file is no such record.
    """
    from eval.common.provenance import provenance
    from eval.common.style import save_figure
    from eval.landmark.figures import summary_figure

    out = Path(out)
    cells = {path: values for folder in recall for path, values in _needle_cells(folder)}
    found = {
        "needles": needle_points(list(cells.values())),
        "retrieval": retrieval_points(
            [_record(path, retrieval_points, "rows", "wanted") for path in diagnoses]
        ),
        "perplexity": sweep_points(
            [_record(path, sweep_points, "rows", "text") for path in sweeps], block
        ),
        "decoding": decoding_points(
            [_record(path, decoding_points, "contexts") for path in (contexts,) if path is not None]
        ),
    }
    claim_outputs(out, "landmark.json", named("landmark", *PICTURES))
    files = [str(path) for path in (*cells, *diagnoses, *sweeps, contexts) if path is not None]
    write_json(out / "landmark.json", {**found, "files": files, **provenance()})
    save_figure(summary_figure(found), out / "landmark")
    return found


def _record(
    path: Path, points: Callable[[list[dict[str, Any]]], object], *keys: str
) -> dict[str, Any]:
    """Read a record with these keys, of which `points` can be made. Raises UserError."""
    values = read_object(path)
    missing = [key for key in keys if key not in values]
    if missing:
        raise UserError(f"{path}: has no {missing[0]!r}; it is not the record that is asked for")
    try:
        points([values])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        raise UserError(f"{path}: is not the record that is asked for ({why})") from None
    return values


def _needle_cells(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Read the finished cells of the task needle in a folder of `eval.recall`.

    Raises:
        UserError: there is none, or a file is no cell's.
    """
    found = False
    for path in sorted((folder / "cells").glob("*.json")):
        values = read_object(path)
        cell = values.get("cell")
        task = cell.get("task") if isinstance(cell, dict) else None
        if isinstance(task, str) and task.partition(":")[0] == "needle":
            found = True
            yield path, _record(path, needle_points, "tests", "validation")
    if not found:
        raise UserError(
            f"--recall {folder}: its cells/ has no finished one of the task needle; make them by "
            "python -m eval.recall run --task needle"
        )


def needle_points(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds of the accuracy at each length, for each mixer and width.

    Where there are several learning rates, those of the best mean on validation rows are shown.

    Raises:
        UserError: the cells are of tasks that differ.
    """
    from eval.recall.tasks import make_task

    tasks = {f"{r['cell']['task']} at length {r['cell']['seq_len']}" for r in records}
    if len(tasks) > 1:
        raise UserError(f"--recall: models of {' and of '.join(sorted(tasks))}; draw one alone")
    widths = {record["cell"]["d_model"] for record in records}
    groups: dict[str, dict[float, list[Mapping[str, Any]]]] = {}
    for record in records:
        cell = record["cell"]
        series = record["mixer"]["label"] + (f", d {cell['d_model']}" if len(widths) > 1 else "")
        groups.setdefault(series, {}).setdefault(cell["lr"], []).append(record)
    found = []
    for series, rates in sorted(groups.items()):
        best = max(rates, key=lambda lr: _mean(r["validation"]["accuracy"] for r in rates[lr]))
        by_length: dict[int, list[float]] = {}
        for record in rates[best]:
            for test in record["tests"].values():
                by_length.setdefault(test["seq_len"], []).append(test["accuracy"])
        options = parse_specification(rates[best][0]["cell"]["task"])[1]
        for length, accuracies in sorted(by_length.items()):
            values = {"series": series, "lr": best, "length": length, "seeds": len(accuracies)}
            spread = {"accuracy": _mean(accuracies), "range": [min(accuracies), max(accuracies)]}
            chance = make_task("needle", length, options).chance
            found.append(values | spread | {"chance": chance})
    return found


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def series_of(label: str) -> str:
    """Give a model's name without the number of its seed."""
    return _SEED.sub("", label)


def retrieval_points(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Means over heads, in bins of x, for each series: measured and predicted.

    Heads are weighed by their `far` attention. Rows in which no choice is left have no x.
    """
    bins: dict[tuple[str, int], list[tuple[float, Mapping[str, Any]]]] = {}
    for record in records:
        for row in record["rows"]:
            if row["rivals"] <= row["top_k"] or row["snr_squared"] <= 0:
                continue
            x = row["snr_squared"] / (2 * row["block"] * math.log(row["rivals"] / row["top_k"]))
            place = sum(x >= edge for edge in EDGES)
            if 0 < place < len(EDGES):
                bins.setdefault((series_of(record["label"]), place), []).append((x, row))
    found = []
    for (series, _), rows in sorted(bins.items()):
        weight = math.fsum(row["far"] for _, row in rows) or 1.0
        means = {
            name: math.fsum(row["far"] * row[name] for _, row in rows) / weight
            for name in ("retrieved", "predicted")
        }
        x = math.exp(math.fsum(row["far"] * math.log(x) for x, row in rows) / weight)
        found.append({"series": series, "x": x, "heads": len(rows), **means})
    return found


def sweep_points(
    records: Sequence[Mapping[str, Any]], block: int | None = None
) -> list[dict[str, Any]]:
    """Means over seeds, at the largest length and one block size, for each series and selector.

    Raises:
        UserError: the sweeps have no such block size.
    """
    rows = [row for record in records for row in record["rows"] if row["block"] is not None]
    if not rows:
        return []
    longest = max(row["length"] for row in rows)
    rows = [row for row in rows if row["length"] == longest]
    of_models: dict[str, set[int]] = {}
    for row in rows:
        of_models.setdefault(row["label"], set()).add(row["block"])
    common = set.intersection(*of_models.values())
    if block is None and common:
        block = min(common)
    if block not in common:
        known = ", ".join(map(str, sorted(common))) or "none"
        raise UserError(f"--block {block}: all sweeps have {known}; give one of them")
    groups: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["block"] == block:
            key = series_of(row["label"]), row["select"], row["top_k"]
            groups.setdefault(key, []).append(row)
    found = []
    for (series, select, top_k), own in sorted(groups.items()):
        over = [row["over_dense"] for row in own]
        found.append(
            {
                "series": series,
                "select": select,
                "length": longest,
                "block": block,
                "top_k": top_k,
                "share": own[0]["share"],
                "seeds": len(own),
                "over_dense": statistics.fmean(over),
                "range": [min(over), max(over)],
            }
        )
    return found


def decoding_points(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Milliseconds a token of a layer and of the model, dense and with landmarks."""
    found = []
    for result in (result for record in records for result in record["contexts"]):
        for part in ("layer", "model"):
            values = result[part]
            for name, key in (("dense", values["dense"]), ("landmark", "landmark")):
                found.append(
                    {
                        "model": result["name"],
                        "part": part,
                        "attention": name,
                        "context": result["case"]["context"],
                        "ms": values["seconds"][key]["median"] * 1e3,
                    }
                )
    return found


def table(found: Mapping[str, Any]) -> str:
    """Show the points of the first panel and of the third."""
    needles = [
        (
            point["series"],
            str(point["length"]),
            f"{point['accuracy']:.3f}",
            f"{point['range'][0]:.3f} to {point['range'][1]:.3f}",
            str(point["seeds"]),
        )
        for point in found["needles"]
    ]
    rows = [
        (
            point["series"],
            point["select"],
            str(point["block"]),
            str(point["top_k"]),
            f"{point['share']:.1%}",
            f"{point['over_dense']:+.2%}",
            f"{point['range'][0]:+.2%} to {point['range'][1]:+.2%}",
            str(point["seeds"]),
        )
        for point in found["perplexity"]
    ]
    header = ("", "select", "block", "top-k", "keys", "over dense", "range", "seeds")
    parts = [aligned(header, rows, left=(0, 1)) if rows else "no sweeps"]
    if needles:
        header = ("", "length", "needles", "range", "seeds")
        parts.insert(0, aligned(header, needles, left=(0,)))
    return "\n\n".join(parts)
