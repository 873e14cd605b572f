"""Learned filters of recall models: which delay did each head learn?

A filter with a single tap is a delay. One layer that recalls by single taps, a filter a head,
matches a query with the key before its value, and so has

    delay(k) = delay(q) + delay(v) + 1

which is Theorem 1's key delay (q and v at lag 0, k at lag 1) and its like one lag further on. There
is no such rule for copying, nor for layers above others, which may look for what those have
shifted, nor for heads that read others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from cat_lm.mixers import make_mixer
from cat_lm.ops.convolution import kinds
from cat_lm.ops.convolution.kinds import STREAMS
from eval.common.style import save_figure
from eval.lab.figures import draw_taps
from eval.lab.study import Table
from eval.recall.tasks import TASKS

if TYPE_CHECKING:
    from eval.lab.grid import Run

SINGLE = 0.8  # share of a filter's sum of squares from which its largest tap counts as single
_MOST_LINES = 60  # the most lines of a plot
_RULE = "delay(k) = delay(q) + delay(v) + 1"


def table(rows: Sequence[tuple[Run, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the values of a figure: for each panel, mixer and length the best run with filters,
    and its heads' delays.
    """
    best: dict[tuple, tuple[Run, dict[str, Any]]] = {}
    for run, record in rows:
        place = (run.row, run.column, run.line, run.cell.seq_len, run.cell.d_model)
        is_best = place not in best or record["accuracy"] > best[place][1]["accuracy"]
        if any(record["filters"]) and is_best:
            best[place] = (run, record)
    return [
        {
            "row": run.row,
            "column": run.column + (f", d = {run.cell.d_model}" * (run.across == "width")),
            "mixer": run.line,
            "seq_len": run.cell.seq_len,
            "lr": run.cell.lr,
            "seed": run.cell.seed,
            "accuracy": record["accuracy"],
            "heads": _heads_of(record["filters"], run.cell.task, run.cell.mixer),
        }
        for run, record in best.values()
    ]


def save_portrait(record: dict[str, Any], path: Path) -> Path | None:
    """Draw the filters of one run beside its record; None without filters.

    Returns:
        The PNG, or none where the mixer has no such filters.
    """
    if not any(record["filters"]):
        return None
    cell = record["cell"]
    entry = {"row": cell["task"], "column": f"d = {cell['d_model']}", "mixer": cell["mixer"]}
    entry |= {"seq_len": cell["seq_len"], "accuracy": record["accuracy"]}
    entry["heads"] = _heads_of(record["filters"], cell["task"], cell["mixer"])
    picture = draw([entry], f"learning rate {cell['lr']:g}, seed {cell['seed']}")
    save_figure(picture, path.parent / f"{path.stem}-filters")
    return path.with_name(f"{path.stem}-filters.png")


def tables(record: dict[str, Any]) -> list[Table]:
    """Return the report's table of learned filters, where a record has any."""
    entries = [(x, head) for x in record["extra"].get("filters", []) for head in x["heads"]]
    if not entries:
        return []
    ruled = any(verdict(head) for _, head in entries)
    header = ["task", "panel", "mixer", "length", "accuracy", "layer", "head", *STREAMS, "single"]
    rows = []
    for entry, found in entries:
        row = [entry["row"], entry["column"], f"`{entry['mixer']}`", str(entry["seq_len"])]
        row += [f"{entry['accuracy']:.4f}", str(found["layer"]), str(found["head"])]
        row += [str(found["delays"].get(stream, "–")) for stream in STREAMS]
        rows.append([*row, f"{found['single']:.2f}", *([verdict(found)] if ruled else [])])
    rule = f" One layer that recalls by single taps has {_RULE}." * ruled
    text = (
        "The lag of the largest tap of each head's filters, in the run with the best accuracy of "
        f"each place.{rule} `single` is the least share that a largest tap has of the squares of "
        "its filter."
    )
    return [Table("Learned filters", text, header + ["holds"] * ruled, rows)]


def pictures(record: dict[str, Any]) -> dict[str, Figure]:
    """Return the picture of learned filters, where a record has any."""
    entries = record["extra"].get("filters", [])
    title = f"{record['study']}, {record['scale']} scale"
    return {"filters": draw(entries, title)} if entries else {}


def draw(entries: Sequence[dict[str, Any]], title: str) -> Figure:
    """Draw a line for each head, a panel for each stream, beside them what was learned.

    Args:
        entries: as `table` gives them; where there are too many lines, the first ones are drawn.
    """
    lines = [(entry, head) for entry in entries for head in entry["heads"]]
    if len(lines) > _MOST_LINES:
        title += f": the first {_MOST_LINES} of {len(lines)} heads"
        lines = lines[:_MOST_LINES]
    streams = [s for s in STREAMS if any(s in head["taps"] for _, head in lines)]
    panels = {s: [head["taps"].get(s, []) for _, head in lines] for s in streams}
    rule = f"; {_RULE}?" * any(verdict(head) for _, head in lines)
    said = [f"{entry['accuracy']:.3f}  {verdict(head)}".rstrip() for entry, head in lines]
    title = f"{title}\nat the right: accuracy{rule}"
    return draw_taps(panels, [_name(*line) for line in lines], said, title)


def _name(entry: dict[str, Any], head: dict[str, Any]) -> str:
    name = f"{entry['row']}, {entry['column']}, L {entry['seq_len']}: {entry['mixer']}"
    several = len(entry["heads"]) > 1
    return f"{name}, layer {head['layer']}, head {head['head']}" if several else name


def _heads_of(
    filters: Sequence[dict[str, list[list[float]]]], task: str, mixer: str
) -> list[dict[str, Any]]:
    """Describe each head of each layer, for the JSON of a figure.

    Args:
        filters: for each layer, stream -> [H][W], or of pairs of heads [H · H][W], lag 0 first; a
            stream without one has delay 0.

    Returns:
        For each head a dict of `layer`, `head` (or its pair), `taps` and `delays` by stream, and
        `single`: the smallest fraction of a filter's sum of squares that is in its largest tap. For
        a single layer that recalls by filters per head there is also `key_is_one_more`: whether
        delay(k) = delay(q) + delay(v) + 1, None if a filter has no single tap.
    """
    mixes = kinds.mixes_heads(getattr(make_mixer(mixer).options, "conv_type", ""))
    recalls = TASKS.get(task.partition(":")[0]).options.recalls
    found = []
    for layer, streams in enumerate(filters):
        count = len(next(iter(streams.values()), []))
        for head in range(count):
            taps = {s: streams[s][head] for s in STREAMS if s in streams}
            delays = {s: int(np.abs(f).argmax()) for s, f in taps.items()}
            shares = [np.square(f).max() / max(np.square(f).sum(), 1e-30) for f in taps.values()]
            to, source = divmod(head, math.isqrt(count))
            one = {"layer": layer, "head": f"{to} from {source}" if mixes else head}
            one |= {"taps": taps, "delays": delays, "single": round(float(min(shares)), 3)}
            if recalls and len(filters) == 1 and not mixes:
                lag = dict.fromkeys(STREAMS, 0) | delays
                holds = lag["k"] == lag["q"] + lag["v"] + 1
                one["key_is_one_more"] = holds if min(shares) >= SINGLE else None
            found.append(one)
    return found


def verdict(head: dict[str, Any]) -> str:
    """Return whether a head follows the rule; "" if the rule does not apply."""
    if "key_is_one_more" not in head:
        return ""
    return {True: "yes", False: "no", None: "several taps"}[head["key_is_one_more"]]
