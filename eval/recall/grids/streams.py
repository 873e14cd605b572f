"""Ablate the convolved streams: every subset of q, k and v, on recall and on text.

Two claims stand against each other. Su's post "Why do linear attention models add short conv?" says
that in linear attention the keys' convolution matters most, because it makes the pairs that a layer
memorises (k_{t−1}, v_t) instead of (k_t, v_t), and that with K = V nothing can be learned without
it. Li et al. (CAT, arXiv version, section 7) remark that in real runs convolving keys and queries
does not help. So: softmax attention, linear attention, DeltaNet and Gated DeltaNet, each with a
convolution on every subset of its streams, with separate and with shared keys and values. None of
them has positions: softmax and linear attention know order by causality and convolution alone.
"""

from __future__ import annotations

import csv
import io
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from cat_lm.data.manifest import read_manifest
from cat_lm.io.files import write_json, write_text
from eval.common.outputs import PICTURES, claim_outputs, named
from eval.common.provenance import provenance
from eval.common.style import MARKERS, RUN_COLOURS, STYLE, save_figure
from eval.common.text_table import markdown_table
from eval.recall.grids.plan import Run
from eval.recall.train import cells
from eval.recall.train.execution import Execution, run_unfinished
from eval.recall.train.language import LanguageCell
from eval.recall.train.trial import Cell

SUBSETS = ("none", "q", "k", "v", "qk", "qv", "kv", "qkv")
SHARED_SUBSETS = ("none", "q", "k", "v", "qkv")
WINDOW = 4  # of DeltaNet and its kin; the same for all, so that only the subset differs
# As wide values as keys in all of them, so that K = V is possible.
MIXERS = {
    "softmax attention": "cat",
    "linear attention": "lincat",
    "DeltaNet": "deltanet",
    "Gated DeltaNet": "gated-deltanet",
}
RECALL, LANGUAGE = "MQAR", "text"


@dataclass(frozen=True)
class Scale:
    """Fix how large the ablation is: recall with one layer, then text with `layers`."""

    d_model: int
    vocab_size: int
    seq_len: int
    examples: int
    epochs: int
    batch_size: int
    rates: tuple[float, ...]
    seeds: int
    layers: int
    text_len: int
    text_steps: int
    text_rates: tuple[float, ...]


SCALES = {
    "smoke": Scale(16, 64, 16, 256, 1, 64, (1e-2,), 1, 1, 32, 4, (3e-3,)),
    "cpu": Scale(64, 128, 32, 16_000, 2, 64, (3e-3, 1e-2), 3, 2, 64, 1_000, (1e-2,)),
    "paper": Scale(
        128, 8192, 128, 100_000, 32, 256, (1e-3, 3e-3, 1e-2), 3, 12, 1024, 20_000, (1e-3, 3e-3)
    ),
}


def plan(scale: Scale, data: str) -> list[Run]:
    """All runs: a row for recall and one for text, a column a mixer, a line a subset.

    Raises:
        UserError: `data` holds no prepared data.
    """
    fingerprint = read_manifest(data)["fingerprint"]
    return [
        Run(row, name, line, cell)
        for name, mixer in MIXERS.items()
        for line, options in _lines(mixer)
        for row, cell in _cells(scale, f"{mixer}:{options}", data, fingerprint)
    ]


def _lines(mixer: str) -> Iterator[tuple[str, str]]:
    """(name of a line, options of the mixer)."""
    fixed = f"window={WINDOW}" + (",expand_v=1.0" if mixer == "gated-deltanet" else "")
    for subset in SUBSETS:
        yield subset, f"streams={subset},{fixed}"
    for subset in SHARED_SUBSETS:
        yield f"K = V, {subset}", f"streams={subset},{fixed},shared_kv=true"


def _cells(
    scale: Scale, mixer: str, data: str, fingerprint: str
) -> Iterator[tuple[str, Cell | LanguageCell]]:
    for seed in range(scale.seeds):
        for rate in scale.rates:
            yield (
                RECALL,
                Cell(
                    f"mqar:vocab_size={scale.vocab_size}",
                    mixer,
                    scale.d_model,
                    scale.seq_len,
                    lr=rate,
                    seed=seed,
                    layers=1,
                    epochs=scale.epochs,
                    train_examples=scale.examples,
                    test_examples=1_000,
                    batch_size=scale.batch_size,
                ),
            )
        for rate in scale.text_rates:
            yield (
                LANGUAGE,
                LanguageCell(
                    data,
                    fingerprint,
                    mixer,
                    scale.d_model,
                    scale.text_len,
                    scale.layers,
                    scale.text_steps,
                    rate,
                    seed,
                ),
            )


def ablation(scale_name: str, data: str, out: Path, execution: Execution) -> dict[str, Any] | None:
    """Estimates, runs what is not finished, and writes streams.json, .csv, .md and a picture.

    Returns:
        What streams.json got, or none after an estimate alone.
    """
    runs = plan(SCALES[scale_name], data)
    if not execution.estimate_only:
        claim_outputs(out, "streams.json", named("streams", ".md", ".csv", *PICTURES))
    if not run_unfinished(f"streams at {scale_name} scale", runs, out, execution):
        return None
    lines = summary([(run, cells.finished(out, run.cell)) for run in runs])
    record = {"scale": scale_name, "data": data, "lines": lines, "provenance": provenance()}
    write_json(out / "streams.json", record)
    write_text(out / "streams.md", table(lines))
    write_text(out / "streams.csv", _csv(lines))
    save_figure(draw(lines), out / "streams")
    print(table(lines))
    return record


def summary(rows: Sequence[tuple[Run, dict[str, Any]]]) -> list[dict[str, Any]]:
    """For each row, column and line: mean, least and largest over the seeds at the best rate.

    `value` is accuracy for recall, where more is better, and nats a token for text, where less is.
    """
    found: dict[tuple, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run, record in rows:
        value = record["accuracy"] if run.row == RECALL else record["loss"]
        found[run.row, run.column, run.line][run.cell.lr].append(value)
    lines = []
    for (row, column, line), rates in found.items():
        means = {rate: sum(values) / len(values) for rate, values in rates.items()}
        sign = 1 if row == RECALL else -1
        # A diverged rate, whose mean is not a number, is the last choice.
        best = max(means, key=lambda r: -math.inf if math.isnan(means[r]) else sign * means[r])
        on_edge = len(rates) > 1 and best in (min(rates), max(rates))
        lines.append(
            {
                "row": row,
                "mixer": column,
                "streams": line,
                "best_lr": best,
                "best_lr_on_grid_edge": on_edge,
                "mean": means[best],
                "min": min(rates[best]),
                "max": max(rates[best]),
                "runs": {f"{rate:g}": values for rate, values in rates.items()},
            }
        )
    return lines


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line for each subset, a column for each mixer; mean (least to largest)."""
    text = []
    for row, unit in ((RECALL, "accuracy"), (LANGUAGE, "validation loss, nats a token")):
        of_row = {(x["mixer"], x["streams"]): x for x in lines if x["row"] == row}
        mixers, subsets = (list(dict.fromkeys(key[i] for key in of_row)) for i in (0, 1))
        text += [f"{row}: {unit}, mean (least to largest) over the seeds", ""]
        rows = []
        for subset in subsets:
            values = (of_row[mixer, subset] for mixer in mixers)
            shown = (f"{x['mean']:.3f} ({x['min']:.3f} to {x['max']:.3f})" for x in values)
            rows.append([subset, *shown])
        text.append(markdown_table(["convolved", *mixers], rows))
        several = [x for x in of_row.values() if len(x["runs"]) > 1]
        edges = sum(x["best_lr_on_grid_edge"] for x in several)
        grid = f"The best learning rate is on its grid's edge in {edges} of {len(several)}."
        text += ["", grid if several else "One learning rate was run.", ""]
    return "\n".join(text)


def _csv(lines: Sequence[dict[str, Any]]) -> str:
    stream = io.StringIO()
    names = ("row", "mixer", "streams", "best_lr", "best_lr_on_grid_edge", "mean", "min", "max")
    writer = csv.DictWriter(stream, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return stream.getvalue()


def draw(lines: Sequence[dict[str, Any]]) -> Figure:
    """Two panels, recall and text: a subset a place, a mixer a colour, bars from least to most."""
    mixers = list(dict.fromkeys(x["mixer"] for x in lines))
    subsets = list(dict.fromkeys(x["streams"] for x in lines))
    with matplotlib.rc_context(STYLE):
        drawing = Figure(figsize=(7.4, 6.0), layout="constrained")
        panels = drawing.subplots(2, 1, sharex=True)
        labels = {RECALL: "accuracy", LANGUAGE: "loss, nats a token"}
        for axes, row in zip(panels, (RECALL, LANGUAGE), strict=True):
            for number, mixer in enumerate(mixers):
                of_mixer = {
                    x["streams"]: x for x in lines if (x["row"], x["mixer"]) == (row, mixer)
                }
                places = [subsets.index(name) + (number - 1.5) * 0.18 for name in of_mixer]
                means = [x["mean"] for x in of_mixer.values()]
                down = [x["mean"] - x["min"] for x in of_mixer.values()]
                up = [x["max"] - x["mean"] for x in of_mixer.values()]
                colour, marker = RUN_COLOURS[number], MARKERS[number]
                axes.errorbar(
                    places, means, (down, up), fmt=marker, color=colour, capsize=2, label=mixer
                )
            axes.set_title(row, loc="left")
            axes.set_ylabel(labels[row])
        panels[1].set_xticks(range(len(subsets)), subsets, rotation=30, ha="right")
        panels[1].set_xlabel("convolved streams")
        drawing.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return drawing
