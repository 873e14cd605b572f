"""`python -m eval.zero_shot MODEL --tasks table2 --out DIR`: tasks of lm-evaluation-harness.

MODEL is a transformers folder or a run folder with an export. The tasks are the harness's own:
`table2` for those of the paper's Table 2, or any names that `lm_eval ls tasks` prints, with commas
between. Their rows come from the Hub, at commits that the result names, or with `--data-dir` from
local jsonl files without a network; `--prefetch DIR` writes such a folder where there is one.

Several GPUs: `torchrun --nproc-per-node 8 -m eval.zero_shot MODEL ...`, or accelerate's launcher.
A call that was interrupted is repeated: finished tasks are not computed again.

The harness's own command gives the same numbers, where they are not in float32 with its dtype too:

    lm_eval --model hf --model_args pretrained=MODEL --tasks piqa
    lm_eval --model hf --model_args pretrained=MODEL,dtype=bfloat16,softmax_dtype=float32 …
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from cat_lm.core import numbers
from cat_lm.core.cli import Parser, add_skip_checksums, or_word, output_path, path_name, whole
from cat_lm.core.errors import UserError, command, hard_exit
from cat_lm.core.folders import check_output
from cat_lm.pretrained.loading import model_folder, quiet_transformers
from cat_lm.pretrained.record import comparing_files
from eval.common.precision import DTYPES
from eval.zero_shot.harness import require_harness

RUN_SUBFOLDER = "zero_shot"  # of a run folder, where no --out is given


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m eval.zero_shot",
        description="Zero-shot tasks of lm-evaluation-harness.",
        epilog="Several GPUs: torchrun --nproc-per-node N -m eval.zero_shot MODEL ...",
    )
    parser.add_argument(
        "model", nargs="?", type=path_name, metavar="MODEL", help="transformers or run folder"
    )
    parser.add_argument(
        "--tasks",
        default="table2",
        metavar="A,B,...",
        help="harness tasks, groups or tags; table2 (default): those of the paper's Table 2",
    )
    parser.add_argument(
        "--out", type=output_path, metavar="DIR", help="default for a run folder: MODEL/zero_shot"
    )
    parser.add_argument(
        "--data-dir", type=path_name, metavar="DIR", help="rows from DIR/TASK.jsonl, no network"
    )
    parser.add_argument(
        "--include-path", type=path_name, metavar="DIR", help="custom tasks, as YAML of the harness"
    )
    parser.add_argument(
        "--prefetch", type=output_path, metavar="DIR", help="write such a folder from the Hub"
    )
    parser.add_argument(
        "--limit", type=whole(numbers.ROWS), metavar="N", help="the first N rows of every task"
    )
    parser.add_argument(
        "--batch-size",
        type=or_word(whole(numbers.BATCH), "auto"),
        default="auto",
        metavar="N",
        help="rows, or auto (default)",
    )
    parser.add_argument(
        "--max-length",
        type=whole(numbers.Range(2, numbers.CONTEXT.high)),
        metavar="T",
        help="context; default: config.json",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="auto (default): the file's; on a GPU bfloat16 for exports of bf16 runs in float32",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, …")
    parser.add_argument("--samples", action="store_true", help="log every prompt and answer")
    parser.add_argument(
        "--bootstrap-iterations",
        type=whole(numbers.BOOTSTRAP_ITERATIONS),
        default=1000,
        metavar="N",
        help="for standard errors of perplexities (default 1000; 0: no standard errors at all)",
    )
    add_skip_checksums(parser)
    return parser.parse_args(arguments)


@command
def main() -> None:
    try:
        arguments = parse_arguments()
        with comparing_files(skip=arguments.skip_checksums):
            _main(arguments)
    except UserError:
        if int(os.environ.get("RANK", "0")) != 0:
            # Rank 0 says it: what it knew from the arguments, or what the ranks agreed on.
            raise SystemExit(2) from None
        raise
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        hard_exit(0)


def _main(arguments: argparse.Namespace) -> None:
    names = [name.strip() for name in arguments.tasks.split(",") if name.strip()]
    if not names:
        raise UserError("--tasks: names no task; known are table2 and `lm_eval ls tasks`")
    if arguments.model is None and arguments.prefetch is None:
        raise UserError("MODEL: missing; give a transformers folder or a run folder")
    if arguments.prefetch is not None:
        check_output(arguments.prefetch, "--prefetch")
    require_harness()
    if arguments.prefetch is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("--prefetch: one process writes the folder; run it without torchrun first")
    first = int(os.environ.get("RANK", "0")) == 0
    out = None
    if arguments.model is not None:
        if first:  # the others may not see the folder; that is found out together with rank 0
            model_folder(arguments.model)
        out = _out(arguments, first)
    # Read when tqdm is imported: the harness's bars go, those that say `disable=None` stay.
    os.environ["TQDM_DISABLE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    quiet_transformers()
    include = _include_path(arguments.include_path)
    if arguments.prefetch is not None:
        from eval.zero_shot.tasks.prefetch import prefetch

        prefetch(names, arguments.prefetch, include)
        if arguments.model is None:
            return
    from eval.zero_shot.results import table
    from eval.zero_shot.run import Settings, run

    data_dir = arguments.data_dir or arguments.prefetch
    settings = Settings(
        data_dir=None if data_dir is None else Path(data_dir),
        include_path=include,
        limit=arguments.limit,
        batch_size=arguments.batch_size,
        dtype=arguments.dtype,
        device=arguments.device,
        max_length=arguments.max_length,
        samples=arguments.samples,
        bootstrap_iterations=arguments.bootstrap_iterations,
    )
    result = run(arguments.model, names, out, settings)
    if first:
        print(table(result))


def _include_path(folder: str | None) -> Path | None:
    if folder is not None and not Path(folder).is_dir():
        raise UserError(f"--include-path {folder}: no such folder")
    return None if folder is None else Path(folder).absolute()


def _out(arguments: argparse.Namespace, first: bool) -> Path:
    if arguments.out is not None:
        check_output(arguments.out)
        return Path(arguments.out)
    if not first or (Path(arguments.model) / "model" / "config.json").is_file():
        return Path(arguments.model) / RUN_SUBFOLDER
    raise UserError(f"--out: missing; it may be left out only for a run folder ({arguments.model})")


if __name__ == "__main__":
    main()
