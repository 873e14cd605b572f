"""`python -m eval.quickstart RUN [RUN ...] --out DIR`: evaluates finished runs, then reports them.

For each run (a folder of train.py with an export in `model/`): perplexity and bits per byte on
the validation split of its own data at 0.5, 1, 2 and 4 times the training length, and sampled
continuations of held-out documents with a fixed seed, into RUN/eval/. Then the report of all runs
into DIR. As many held-out tokens are scored as the run's own validations took (`--max-tokens`
changes it), which keeps this short; the report says how many.

launch/quickstart.sh ends with

    python -m eval.quickstart runs/quickstart/cat --out runs/quickstart

and with `--compare` names three runs instead of one. Finished lengths are not computed again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cat_lm.core import numbers
from cat_lm.core.cli import Parser, add_skip_checksums, output_path, path_name, whole
from cat_lm.core.errors import UserError, command
from cat_lm.core.folders import check_output
from cat_lm.pretrained.loading import begin, model_folder
from cat_lm.pretrained.record import comparing_files

FACTORS = (0.5, 1, 2, 4)  # lengths relative to the training length
MAX_TOKENS = 65_536  # used if the run's own validation has no limit


def evaluate(run: Path, max_tokens: int | None = None, seed: int = 0) -> None:
    """Fill RUN/eval/ with the length sweep and the samples.

    Args:
        max_tokens: held-out tokens to score; default: as many as the run's validations took, so
            that the perplexity at the training length is the one that training ended with.

    Raises:
        UserError: the run has no export, or its data are absent or too short.
    """
    from cat_lm.config import load_config
    from eval.common.result_files import EVALUATION
    from eval.length_sweep.sweep import sweep, table
    from eval.samples import Sampling, write_samples

    config = load_config(run / "config.yaml")
    trained, data = config.data.context_length, config.data.folders[0]
    lengths = [max(1, int(factor * trained)) for factor in FACTORS]
    limit = max_tokens or config.validation.max_tokens or MAX_TOKENS
    limit = max(limit, max(lengths))
    print(table(sweep([run], lengths, run / EVALUATION, data=data, max_tokens=limit)), flush=True)
    print(f"{run}: sampling continuations of held-out documents", file=sys.stderr)
    write_samples(run, Sampling(seed=seed))


@command
def main() -> None:
    parser = Parser(
        prog="python -m eval.quickstart",
        description="Evaluates finished runs on held-out text and writes one report of them.",
    )
    parser.add_argument(
        "runs", nargs="+", type=path_name, metavar="RUN", help="run folder of train.py with model/"
    )
    parser.add_argument(
        "--out", type=output_path, required=True, metavar="DIR", help="folder for the report"
    )
    parser.add_argument("--title", help="headline of the report")
    parser.add_argument(
        "--max-tokens",
        type=whole(numbers.SCORED_TOKENS),
        metavar="N",
        help="held-out tokens to score for each length, at least one window of the largest",
    )
    parser.add_argument(
        "--seed", type=whole(numbers.SEED), default=0, help="seed of the sampled continuations"
    )
    add_skip_checksums(parser)
    arguments = parser.parse_args()
    check_output(arguments.out)
    runs = [Path(run) for run in arguments.runs]
    for run in runs:
        # All runs are checked before the first one is worked on.
        model_folder(run)
        if not (run / "config.yaml").is_file():
            raise UserError(f"run {run}: has no config.yaml; give the folder of a run of train.py")
    begin(*runs)
    from cat_lm.core.outputs import claim_outputs
    from eval.common.result_files import EVALUATION
    from eval.report.write import report

    for run in runs:
        claim_outputs(run / EVALUATION, "samples.json")

    with comparing_files(skip=arguments.skip_checksums):
        for run in runs:
            evaluate(run, arguments.max_tokens, arguments.seed)
        print(report(runs, arguments.out, arguments.title))


if __name__ == "__main__":
    main()
