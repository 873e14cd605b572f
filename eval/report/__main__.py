"""`python -m eval.report RUN [RUN ...] --out DIR`: finished runs side by side, as a page.

A run is a folder that train.py wrote. What is shown of it: metrics.jsonl and config.yaml (loss
curves, final numbers), `model/` (the learned filters), `eval/length_sweep.json` and
`eval/samples.json` (`python -m eval.quickstart RUN` makes both), and `zero_shot/zero_shot.json`
(`python -m eval.zero_shot RUN`). What a run lacks is named with the command that makes it.

OUT gets index.html, which needs no network and no other file; the pictures as PNG and SVG; the
paper's Table 2 with these runs as table2.md, .html and .csv; summary.json and summary.csv.
"""

from __future__ import annotations

from cat_lm.core.cli import Parser, add_skip_checksums, announce, output_path, path_name
from cat_lm.core.errors import command
from cat_lm.core.folders import check_output
from cat_lm.pretrained.record import comparing_files
from eval.report.write import report


@command
def main() -> None:
    parser = Parser(
        prog="python -m eval.report", description="Tables and figures from finished runs."
    )
    parser.add_argument(
        "runs", nargs="+", type=path_name, metavar="RUN", help="folder that train.py wrote"
    )
    parser.add_argument("--out", type=output_path, required=True, metavar="DIR")
    parser.add_argument("--title", help="headline of the page")
    add_skip_checksums(parser)
    arguments = parser.parse_args()
    check_output(arguments.out)
    announce(f"{arguments.out}: writing the report of {', '.join(arguments.runs)}")
    with comparing_files(skip=arguments.skip_checksums):
        print(report(arguments.runs, arguments.out, arguments.title))


if __name__ == "__main__":
    main()
