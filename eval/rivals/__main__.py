"""`python -m eval.rivals`: runs what is missing of the comparison, then writes what it found."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from cat_lm.core.errors import command
from cat_lm.core.files import write_json, write_text
from cat_lm.core.folders import check_output
from cat_lm.core.outputs import PICTURES, claim_outputs, named
from eval.rivals.rows import Comparison, check_rows, comparison_of, parse_arguments
from eval.small_study.plan import ROOT
from eval.small_study.run import prepared, run_missing

if TYPE_CHECKING:
    from eval.small_study.tune import Tuned


@command
def main() -> None:
    arguments = parse_arguments()
    if arguments.out is not None:
        check_output(arguments.out)
    study = comparison_of(arguments)
    os.chdir(ROOT)
    # Only now: what follows needs the libraries that --help and wrong arguments do without.
    from cat_lm.data.opening import open_verified
    from eval.common.interrupts import held

    fingerprints = prepared(study, own=arguments.data is not None)
    check_rows(study, open_verified(study.data, "train").vocab_size)
    with held(study.out) as lock:
        if not arguments.estimate:
            claim_outputs(study.out, "summary.json", named("rivals", ".html", ".md", *PICTURES))
        run_missing(
            study, fingerprints, lock, arguments.parallel, arguments.estimate, write_results
        )


def write_results(study: Comparison, rates: dict[str, Tuned]) -> Path:
    """summary.json, the picture, the tables, and last the page; returns the page's path."""
    from eval.common.style import save_figure
    from eval.rivals.figure import rivals_figure
    from eval.rivals.page import markdown, page
    from eval.rivals.summary import summarise

    summary = summarise(study, rates)
    write_json(study.out / "summary.json", summary)
    save_figure(rivals_figure(summary), study.out / "rivals")
    text = markdown(summary)
    write_text(study.out / "rivals.md", text)
    write_text(study.out / "rivals.html", page(summary))
    print(text)
    return study.out / "rivals.html"


if __name__ == "__main__":
    main()
