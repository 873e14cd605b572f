"""`python -m eval.speed conv|train|decode`: speed.

Exit codes: 0 everything asked for was measured, 1 something was wrong and is refused, 2 bad input.
"""

from __future__ import annotations

import argparse
import sys

from cat_lm.core import numbers
from cat_lm.core.cli import Parser, number, output_file, whole, whole_numbers
from cat_lm.core.errors import command
from eval.speed.arguments import names, shape
from eval.speed.choices import (
    DTYPES,
    KERNELS,
    QKV_KIND,
    SIZES,
    VOCAB_SIZE,
    conv_types,
    decoding_models,
    default_models,
    models,
)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m eval.speed", description="Speed and memory, measured side by side."
    )
    benchmarks = parser.add_subparsers(dest="benchmark", required=True)
    _add_conv(benchmarks.add_parser("conv", help="the convolutions, beside torch's and others'"))
    _add_train(benchmarks.add_parser("train", help="a training step of each model"))
    _add_decode(benchmarks.add_parser("decode", help="greedy decoding with and without the cache"))
    for parser_ in benchmarks.choices.values():
        parser_.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, …")
        parser_.add_argument(
            "--threads", type=whole(numbers.CORES), metavar="N", help="of a CPU; default: all"
        )
        parser_.add_argument(
            "--json", type=output_file, metavar="FILE", help="where to write the record"
        )
    return parser


def _add_conv(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--conv-type",
        type=names(conv_types()),
        default=(QKV_KIND,),
        metavar="LIST",
        help=f"of {', '.join(conv_types())}; qkv is the step from the packed projection to "
        f"attention's inputs: three {QKV_KIND} convolutions, bias and rotation (default: "
        f"{QKV_KIND})",
    )
    parser.add_argument(
        "--windows",
        type=whole_numbers(numbers.WINDOW, "3,4,8"),
        default=(3, 4, 8, 21, 64),
        metavar="LIST",
        help="W (default: 3,4,8,21,64)",
    )
    parser.add_argument(
        "--shape",
        type=shape,
        action="append",
        metavar="B,T,H,D",
        help="may be given several times (default: of the 370M and of the 1.4B model, "
        "2,2048,16,64 and 2,2048,16,128 on a CPU, 32,… and 16,… on a GPU)",
    )
    parser.add_argument(
        "--dtype",
        type=names(DTYPES),
        default=DTYPES,
        metavar="LIST",
        help=f"of {', '.join(DTYPES)} (default: both)",
    )
    parser.add_argument(
        "--kernels",
        type=names(KERNELS),
        default=KERNELS[1:],
        metavar="LIST",
        help=f"of {', '.join(KERNELS)} (default: all but the slow reference)",
    )
    parser.add_argument(
        "--repeats",
        type=whole(numbers.REPEATS),
        metavar="N",
        help="default: 10 on a CPU, 100 on a GPU",
    )
    parser.add_argument(
        "--eager",
        action="store_true",
        help="GPU: time calls with Python's launch overhead, not replays of CUDA graphs",
    )


def _add_model(parser: argparse.ArgumentParser, known: tuple[str, ...], repeats: int) -> None:
    usual = default_models(known)
    parser.add_argument(
        "--models",
        type=names(known, every="all"),
        default=usual,
        metavar="LIST",
        help=f"of {', '.join(known)}; or all (default: {', '.join(usual)})",
    )
    _add_size(parser)
    parser.add_argument("--batch-size", type=whole(numbers.BATCH), metavar="N")
    _add_repeats(parser, repeats)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument(
        "--attention", choices=("sdpa", "eager", "flash_attention_2"), default="sdpa"
    )


def _add_repeats(parser: argparse.ArgumentParser, default: int) -> None:
    of_it = {"default": default, "help": f"default: {default}"}
    parser.add_argument("--repeats", type=whole(numbers.REPEATS), metavar="N", **of_it)


def _add_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=SIZES, default="small")
    sizes = {"hidden-size": numbers.HIDDEN_SIZE, "layers": numbers.LAYERS, "heads": numbers.HEADS}
    for name, allowed in sizes.items():
        parser.add_argument(
            f"--{name}", type=whole(allowed), metavar="N", help="default: the size's"
        )
    parser.add_argument(
        "--vocab-size", type=whole(numbers.VOCABULARY), default=VOCAB_SIZE, metavar="N"
    )
    parser.add_argument("--window", type=whole(numbers.WINDOW), default=21, metavar="W")


def _add_train(parser: argparse.ArgumentParser) -> None:
    _add_model(parser, tuple(models()), repeats=5)
    parser.set_defaults(batch_size=4)
    parser.add_argument(
        "--context-length", type=whole(numbers.CONTEXT), metavar="N", help="default: the size's"
    )
    parser.add_argument(
        "--optimizer",
        action="store_true",
        help="the whole step of `train.py`: its engine, gradients accumulated and clipped, AdamW "
        "with its moments in fp32",
    )
    parser.add_argument("--compile", action="store_true", help="under torch.compile")
    parser.add_argument(
        "--peak-tflops",
        type=number(numbers.TFLOPS),
        metavar="X",
        help="of the device in this dtype, for MFU (default: by its name in bf16)",
    )


def _add_decode(parser: argparse.ArgumentParser) -> None:
    _add_model(parser, decoding_models(), repeats=3)
    parser.set_defaults(batch_size=1)
    read = parser.add_mutually_exclusive_group()
    read.add_argument(
        "--contexts",
        type=whole_numbers(numbers.CONTEXT, "16384,131072"),
        metavar="LIST",
        help="decode after so many random keys and values, over all of them and with landmark "
        "attention, in one layer and in the model (CPU)",
    )
    for name, what in (
        ("block", "tokens of a block (default: 64)"),
        ("top-k", "blocks chosen (default: 8)"),
        ("local", "blocks near the token (default: 2)"),
    ):
        allowed = numbers.Range(0, numbers.CONTEXT.high) if name == "top-k" else numbers.CONTEXT
        parser.add_argument(
            f"--{name}", type=whole(allowed), metavar="N", help=f"--contexts: {what}"
        )
    read.add_argument(
        "--prompts",
        type=whole_numbers(numbers.CONTEXT, "256,1024", distinct=True),
        default=(2048, 16384),
        metavar="LIST",
        help="tokens of the prompts (default: 2048,16384, which takes a CPU long: try 256,1024)",
    )
    parser.add_argument(
        "--new-tokens",
        type=whole(numbers.NEW_TOKENS.at_least(2)),
        default=32,
        metavar="N",
        help="with cache; the prompt's pass gives the first of them",
    )
    parser.add_argument(
        "--uncached-tokens",
        type=whole(numbers.NEW_TOKENS),
        metavar="N",
        help="without cache (default: 4)",
    )


@command
def main() -> None:
    options = _parser().parse_args()
    from cat_lm.core.files import write_json
    from cat_lm.core.outputs import claim_file
    from eval.speed.run import measure
    from eval.speed.tables import table

    if options.json:
        claim_file(options.json, "--json")
    record = measure(options)
    print(table(record))
    if options.json:
        write_json(options.json, record)
        print(f"wrote {options.json}", file=sys.stderr)
    if refused := record.get("refused"):
        print(f"error: {len(refused)} kernels are wrong and refused", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
