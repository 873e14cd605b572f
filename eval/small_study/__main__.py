"""`python -m eval.small_study`: runs what is missing of the study, then writes what it found."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from cat_lm.core.errors import command
from cat_lm.core.files import write_json
from cat_lm.core.folders import check_output
from cat_lm.core.outputs import PICTURES, claim_outputs, named
from eval.small_study.arguments import parse_arguments, study_of
from eval.small_study.plan import ROOT, Study
from eval.small_study.run import prepared, run_missing

if TYPE_CHECKING:
    from eval.small_study.tune import Tuned


@command
def main() -> None:
    arguments = parse_arguments()
    if arguments.out is not None:
        check_output(arguments.out)
    study = study_of(arguments)
    os.chdir(ROOT)
    # Only now: what follows needs the libraries that --help and wrong arguments do without.
    from eval.common.interrupts import held

    fingerprints = prepared(study, own=arguments.data is not None)
    with held(study.out) as lock:
        if not arguments.estimate:
            claim_outputs(study.out, "summary.json", named("small_study", ".md", ".csv", *PICTURES))
        run_missing(
            study, fingerprints, lock, arguments.parallel, arguments.estimate, write_results
        )


def write_results(study: Study, rates: dict[str, Tuned]) -> Path:
    """summary.json, the tables, the figure and a page of the first seed's runs."""
    from eval.common.style import save_figure
    from eval.report.write import report
    from eval.small_study.collect import collect
    from eval.small_study.figure import study_figure
    from eval.small_study.tables import markdown, write_tables

    summary = collect(study, rates)
    write_json(study.out / "summary.json", summary)
    write_tables(summary, study.out)
    save_figure(study_figure(summary), study.out / "small_study")
    first = [job.folder for job in study.jobs() if job.seed == study.seeds[0]]
    found = [folder for folder in first if (folder / "model").is_dir()]
    if found:
        report(found, study.out / "report", f"Small study: the runs of seed {study.seeds[0]}")
    print(markdown(summary))
    return study.out / "small_study.md"


if __name__ == "__main__":
    main()
