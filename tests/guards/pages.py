"""Tables and Markdown of studies, rendered from their committed records.

`STUDIES` and the adapters above it are the only part of the guards that may be edited when the lab
is rebuilt: each makes a study's page of today's wording from its record. No number is trained or
measured here, and there are no pictures.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.guards.models import ROOT

RECORDS = ROOT / "eval/records"
Adapter = Callable[[Path, str], dict[str, str]]
# Records of earlier versions lack some of what a page says of its runs; these stand for it.
NOT_RECORDED = {
    "trained": {
        "commits": ["0123456789"],
        "machines": ["a machine"],
        "first": "2026-01-01T00:00:00+00:00",
        "last": "2026-01-02T00:00:00+00:00",
    },
    "diverged": [],
}


def read_record(name: str) -> dict[str, Any]:
    """Return a committed record, with what its version did not write."""
    values = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    return NOT_RECORDED | values


def render_report(folder: Path, name: str) -> dict[str, str]:
    """Return the report of a study of the lab."""
    from eval.lab.page import report
    from eval.studies import STUDIES

    record = read_record(name)
    return {"markdown": report(STUDIES.get(record["study"]), record, name)}


def render_theory(folder: Path, name: str) -> dict[str, str]:
    """Return the page of the theory's claims."""
    from eval.recall.theory.report import markdown

    record = read_record(name)
    return {"markdown": markdown(record["claims"], record["provenance"]["command"])}


def render_landmark(folder: Path, name: str) -> dict[str, str]:
    """Return a table of perplexities over dense attention's at the longest length."""
    from eval.common.text_table import align_columns

    rows = []
    positions = {"no positions": "none", "RoPE": "rope"}
    for line in read_record(name)["lines"]:
        way, _, length = line["column"].partition(", ")
        if length == "1,024 tokens":
            over = [math.expm1(value) for value in line["runs"].values()]
            share = statistics.fmean(line["also"]["share"].values())
            spread = f"{min(over):+.2%} to {max(over):+.2%}"
            means = (f"{share:.1%}", f"{statistics.fmean(over):+.2%}", spread, str(len(over)))
            place = (f"{positions[line['row']]}-{way}", line["line"], "16", line["x"])
            rows.append((*place, *means))
    header = ("", "select", "block", "top-k", "keys", "over dense", "range", "seeds")
    cells = [[str(value) for value in row] for row in sorted(rows)]
    return {"table": align_columns(header, cells, left=(0, 1))}


# Study: its record, and what renders it.
STUDIES: dict[str, tuple[str, Adapter]] = {
    "recall: accuracy": ("recall_accuracy_bigrams_cpu", render_report),
    "recall: length": ("recall_length_hard_cpu", render_report),
    "recall: one layer": ("recall_one_layer_figure_cpu", render_report),
    "recall: selective copy": ("recall_copy_generated_cpu", render_report),
    "recall: streams": ("recall_streams_texts_cpu", render_report),
    "recall: Mamba": ("recall_mamba_cpu", render_report),
    "recall: theory": ("theory_cpu", render_theory),
    "language models: qk norms": ("qk_norm_cpu", render_report),
    "language models: long texts": ("long_texts_cpu", render_report),
    "language models: rivals": ("rivals_cpu", render_report),
    "landmarks": ("landmark_cpu", render_landmark),
    "long range: atomic": ("long_range_atomic_cpu", render_report),
    "long range: ListOps": ("long_range_listops_cpu", render_report),
    "long range: smnist": ("long_range_smnist_cpu", render_report),
}


def measure(folder: Path) -> dict[str, Any]:
    """Return the lines of each study's pages and tables."""
    found = {}
    for study, (record, render) in STUDIES.items():
        for kind, text in render(folder, record).items():
            found[f"{study}, {kind}"] = text.splitlines()
    return found
