"""Write a report: its pictures, tables and numbers, and last the page of all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm.core.errors import UserError
from cat_lm.core.files import write_json, write_text

if TYPE_CHECKING:
    from eval.common.runs import Run


def report(folders: Sequence[Path | str], out: Path | str, title: str | None = None) -> Path:
    """Write the report of the runs at `folders` into `out`; return the page's path.

    Raises:
        UserError: a folder is no run, or two runs have the same name.
    """
    import pandas as pd

    from cat_lm.core.outputs import PICTURES, claim_outputs, result_files
    from eval.common.provenance import provenance
    from eval.common.runs import curves, read_run, sweep_rows, unigram_loss
    from eval.common.style import save_figure
    from eval.length_sweep.figures import length_figure
    from eval.report import table2
    from eval.report.figures import filters_figure, loss_figure
    from eval.report.page import page, table2_page

    runs = [read_run(folder) for folder in folders]
    labels = [run.label for run in runs]
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f"run {label}: two runs have this name; rename one folder")
    out = Path(out)
    rows, made = sweep_rows(runs), provenance()
    stems = ["loss", "perplexity_by_length", *(f"filters_{label}" for label in labels)]
    names = ["index.html", "summary.csv", *result_files("table2", ".md", ".html", ".csv")]
    names += [name for stem in stems for name in result_files(stem, *PICTURES)]
    claim_outputs(out, "summary.json", names)
    save_figure(loss_figure(curves(runs), unigram_loss(runs)), out / "loss")
    if rows:
        save_figure(length_figure(rows, order=labels), out / "perplexity_by_length")
    for run in runs:
        if run.filters:
            save_figure(filters_figure(run.filters), out / f"filters_{run.label}")
    tables = table2.own_rows(runs), table2.paper_rows()
    write_text(out / "table2.md", table2.markdown(*tables, table2.warnings(runs)))
    write_text(out / "table2.html", table2_page(runs))
    write_text(out / "table2.csv", pd.concat(tables).to_csv(index=False))
    summary = [final_numbers(run) for run in runs]
    write_json(out / "summary.json", {"runs": summary, "length_sweep": rows, **made})
    # Of another architecture some columns are others.
    write_text(out / "summary.csv", pd.DataFrame(summary, dtype=object).to_csv(index=False))
    # Last, so that a page is only there with all that it stands for.
    index = out / "index.html"
    write_text(index, page(runs, summary, rows, title, made))
    return index


def final_numbers(run: Run) -> dict[str, Any]:
    """Return one row of the table: what the run was and where it ended."""
    from eval.zero_shot.tasks.table2 import average

    final = {} if run.diverged else run.final
    return {
        "run": run.label,
        "architecture": run.config.model.architecture,
        **run.config.architecture.summary(run.config.model).facts,
        "parameters": run.parameters,
        "tokens": run.tokens,
        "steps": run.steps,
        "skipped_steps": run.skipped,
        "diverged": run.diverged,
        **{name: final.get(name) for name in ("val_loss", "val_perplexity", "val_bits_per_byte")},
        "tokens_per_second": run.tokens_per_second,
        "zero_shot_average": average(run.zero_shot.get("tasks", {}))["value"],
    }
