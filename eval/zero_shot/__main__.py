"""`python -m eval.zero_shot MODEL --tasks table2 --out DIR`: tasks of lm-evaluation-harness.

MODEL is a transformers folder or a run folder with an export. The tasks are the harness's own:
`table2` for those of the paper's Table 2, or any names that `lm_eval ls tasks` prints, with commas
between. Their rows come from the Hub, at commits that the result names, or with `--data-dir` from
local jsonl files without a network; `--prefetch DIR` writes such a folder where there is one.

Several GPUs: `torchrun --nproc-per-node 8 -m eval.zero_shot MODEL ...`, or accelerate's launcher.
A call that was interrupted is repeated: finished tasks are not computed again.

The harness's own command gives the same numbers, in half precision with
`dtype=bfloat16,softmax_dtype=float32`:

    lm_eval --model hf --model_args pretrained=MODEL,trust_remote_code=True --tasks piqa
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path

from cat_lm.core.cli import Parser, add_skip_checksums, announce, output_path, path_name
from cat_lm.core.errors import UserError, command, hard_exit
from cat_lm.core.folders import check_output
from cat_lm.pretrained.loading import model_folder, quiet_transformers
from cat_lm.pretrained.record import comparing_files
from eval.common.options import add_options, options_of
from eval.common.result_files import ZERO_SHOT
from eval.zero_shot.settings import Settings
from eval.zero_shot.tasks.harness import launched, require_harness


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m eval.zero_shot",
        description="Zero-shot tasks of lm-evaluation-harness.",
        epilog="Several GPUs: torchrun --nproc-per-node N -m eval.zero_shot MODEL ...",
    )
    folder = {"type": path_name, "metavar": "MODEL", "help": "transformers or run folder"}
    parser.add_argument("model", nargs="?", **folder)
    tasks = "harness tasks, groups or tags; table2 (default): those of the paper's Table 2"
    parser.add_argument("--tasks", default="table2", metavar="A,B,...", help=tasks)
    for name, text in (
        ("--out", "default for a run folder: MODEL/zero_shot"),
        ("--prefetch", "write a folder for --data-dir from the Hub"),
    ):
        parser.add_argument(name, type=output_path, metavar="DIR", help=text)
    add_options(parser, Settings)
    add_skip_checksums(parser)
    return parser


@command
def main() -> None:
    rank, ranks = launched()
    try:
        arguments = _parser().parse_args()
        with comparing_files(skip=arguments.skip_checksums):
            _evaluate(arguments, rank, ranks)
    except UserError:
        if rank != 0:  # Rank 0 reports what it or all ranks know.
            raise SystemExit(2) from None
        raise
    if ranks > 1:
        hard_exit(0)


def _evaluate(arguments: argparse.Namespace, rank: int, ranks: int) -> None:
    names = [name.strip() for name in arguments.tasks.split(",") if name.strip()]
    if not names:
        raise UserError("--tasks: names no task; known are table2 and `lm_eval ls tasks`")
    if arguments.model is None and arguments.prefetch is None:
        raise UserError("MODEL: missing; give a transformers folder or a run folder")
    out = None if arguments.model is None else _out(arguments, rank)
    if arguments.prefetch is not None:
        check_output(arguments.prefetch, "--prefetch")
        if ranks > 1:
            raise UserError(
                "--prefetch: one process writes the folder; run it without torchrun first"
            )
    require_harness()
    announce(f"zero-shot tasks {', '.join(names)} of {arguments.model or arguments.prefetch}")
    # tqdm reads this when it is imported: the harness's own bars are not shown.
    os.environ["TQDM_DISABLE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    quiet_transformers()
    settings = options_of(arguments, Settings)
    if arguments.prefetch is not None:
        from eval.zero_shot.tasks.prefetch import prefetch

        prefetch(names, arguments.prefetch, settings.include_path)
        data_dir = settings.data_dir or arguments.prefetch
        settings = dataclasses.replace(settings, data_dir=data_dir)
    if out is not None:
        from eval.zero_shot.results import table
        from eval.zero_shot.run import run

        result = run(arguments.model, names, out, settings)
        if rank == 0:
            print(table(result))


def _out(arguments: argparse.Namespace, rank: int) -> Path:
    if rank == 0:  # Other ranks may not see the folder; all ranks agree on that later.
        model_folder(arguments.model)
    if arguments.out is not None:
        check_output(arguments.out)
        return arguments.out
    if rank == 0 and not (Path(arguments.model) / "model" / "config.json").is_file():
        raise UserError(
            f"--out: missing; it may be left out only for a run folder ({arguments.model})"
        )
    return Path(arguments.model) / ZERO_SHOT


if __name__ == "__main__":
    main()
