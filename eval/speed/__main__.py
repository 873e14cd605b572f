"""`python -m eval.speed conv|train|decode`: speed.

Exit codes: 0 everything asked for was measured, 1 something was wrong and is refused, 2 bad input.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from typing import Any

from cat_lm.core import numbers
from cat_lm.core.cli import (
    Parser,
    announce,
    comma_separated,
    number,
    output_file,
    whole,
    whole_numbers,
)
from cat_lm.core.errors import UserError, command
from cat_lm.core.host import GIB
from cat_lm.core.readers import clipped
from eval.speed.choices import (
    DTYPES,
    KERNELS,
    QKV,
    QKV_KIND,
    SHAPES,
    SIZES,
    VOCAB_SIZE,
    conv_types,
    decoding_models,
    default_models,
    models,
)

# Names that an error line has room for.
_NAMED = 10
_REPEATS = whole(numbers.REPEATS)


def shape(text: str) -> tuple[int, ...]:
    """Parse four numbers: B,T,H,D."""
    found = whole_numbers(numbers.CONTEXT, "4,1024,8,64")(text)
    if len(found) != 4:
        raise argparse.ArgumentTypeError(
            f"{clipped(text)!r} must be four numbers B,T,H,D: 4,1024,8,64"
        )
    return found


def names(known: tuple[str, ...], every: str | None = None) -> Callable[[str], tuple[str, ...]]:
    """Return a kind for lists of known names; `every` alone stands for all of them."""
    first = ", ".join(known[:_NAMED])
    if len(known) > _NAMED:
        first += f", … (--help has all {len(known)})"

    def check_name(text: str) -> str:
        if text.strip() not in known:
            raise argparse.ArgumentTypeError(f"{clipped(text.strip())!r} is not one of {first}")
        return text.strip()

    several = comma_separated(check_name, ",".join(known[:2]))
    return lambda text: known if text == every else several(text)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m eval.speed", description="Speed and memory, measured side by side."
    )
    benchmarks = parser.add_subparsers(dest="benchmark", required=True)
    _add_conv(benchmarks.add_parser("conv", help="the convolutions, beside torch's and others'"))
    _add_train(benchmarks.add_parser("train", help="a training step of each model"))
    _add_decode(benchmarks.add_parser("decode", help="greedy decoding with and without the cache"))
    for parser_ in benchmarks.choices.values():
        add = parser_.add_argument
        add("--device", default="auto", help="device: auto, cpu, cuda, cuda:1, …")
        add(
            "--threads",
            type=whole(numbers.CORES),
            metavar="N",
            help="number of CPU threads; default: all cores",
        )
        add("--json", type=output_file, metavar="FILE", help="file for the record")
    return parser


def _add_conv(parser: argparse.ArgumentParser) -> None:
    kinds = f"of {', '.join(conv_types())}; qkv is the step from the packed projection to "
    kinds += f"attention's inputs: three {QKV_KIND} convolutions, bias and rotation (default: "
    window = whole_numbers(numbers.WINDOW, "3,4,8")
    shapes = "may be given several times (default: of the 370M and of the 1.4B model, "
    shapes += "2,2048,16,64 and 2,2048,16,128 on a CPU, 32,… and 16,… on a GPU)"
    kernels = f"of {', '.join(KERNELS)} (default: all but the slow reference)"
    dtypes = f"of {', '.join(DTYPES)} (default: both)"
    add = parser.add_argument
    _add_list(add, "--conv-type", names(conv_types()), (QKV_KIND,), f"{kinds}{QKV_KIND})")
    _add_list(add, "--windows", window, (3, 4, 8, 21, 64), "W (default: 3,4,8,21,64)")
    add("--shape", type=shape, action="append", metavar="B,T,H,D", help=shapes)
    _add_list(add, "--dtype", names(DTYPES), DTYPES, dtypes)
    _add_list(add, "--kernels", names(KERNELS), KERNELS[1:], kernels)
    add(
        "--repeats",
        type=_REPEATS,
        metavar="N",
        help="number of rounds (default: 10 on a CPU, 100 on a GPU)",
    )


def _add_list(
    add: Callable[..., Any], flag: str, kind: Callable[[str], Any], default: Any, text: str
) -> None:
    add(flag, type=kind, default=default, metavar="LIST", help=text)


def _add_model(
    parser: argparse.ArgumentParser, known: tuple[str, ...], batch_size: int, repeats: int
) -> None:
    usual = default_models(known)
    text = f"models to time, from {', '.join(known)}; or all (default: {', '.join(usual)})"
    add = parser.add_argument
    _add_list(add, "--models", names(known, every="all"), usual, text)
    add("--size", choices=SIZES, default="small")
    sizes = {"hidden-size": numbers.HIDDEN_SIZE, "layers": numbers.LAYERS, "heads": numbers.HEADS}
    for name, allowed in sizes.items():
        add(f"--{name}", type=whole(allowed), metavar="N", help="default: that of --size")
    add("--vocab-size", type=whole(numbers.VOCABULARY), default=VOCAB_SIZE, metavar="N")
    add("--window", type=whole(numbers.WINDOW), default=21, metavar="W")
    add("--batch-size", type=whole(numbers.BATCH), default=batch_size, metavar="N")
    text = f"number of rounds (default: {repeats})"
    add("--repeats", type=_REPEATS, default=repeats, metavar="N", help=text)
    add("--dtype", choices=DTYPES, default="float32")
    add("--attention", choices=("sdpa", "eager", "flash_attention_2"), default="sdpa")


def _add_train(parser: argparse.ArgumentParser) -> None:
    _add_model(parser, tuple(models()), batch_size=4, repeats=5)
    add = parser.add_argument
    add(
        "--context-length",
        type=whole(numbers.CONTEXT),
        metavar="N",
        help="tokens per sequence; default: that of --size",
    )
    add(
        "--optimizer",
        action="store_true",
        help="time the whole step of `train.py`: engine, gradients accumulated and clipped, AdamW "
        "with its moments in fp32",
    )
    add("--compile", action="store_true", help="compile the models with torch.compile")
    add(
        "--peak-tflops",
        type=number(numbers.TFLOPS),
        metavar="X",
        help="peak TFLOP/s of the device in this dtype, for MFU (default: by its name in bf16)",
    )


def _add_decode(parser: argparse.ArgumentParser) -> None:
    _add_model(parser, decoding_models(), batch_size=1, repeats=3)
    prompts = "tokens of the prompts (default: 2048,16384, which takes a CPU long: try 256,1024)"
    kind = whole_numbers(numbers.CONTEXT, "256,1024", distinct=True)
    add = parser.add_argument
    _add_list(add, "--prompts", kind, (2048, 16384), prompts)
    text = "with cache; the prompt's pass gives the first of them"
    kind = whole(numbers.NEW_TOKENS.at_least(2))
    add("--new-tokens", type=kind, default=32, metavar="N", help=text)
    text = "without cache (default: 4)"
    add("--uncached-tokens", type=whole(numbers.NEW_TOKENS), default=4, metavar="N", help=text)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record of the benchmark that the command's options ask for.

    Raises:
        UserError: the options, the device or a model is wrong.
    """
    # Before torch loads: it may bind this thread to one core.
    cores = len(os.sched_getaffinity(0))
    if options.threads is not None and options.threads > cores:
        raise UserError(f"--threads {options.threads}: there are {cores} cores; use at most that")
    announce(f"measuring {options.benchmark} on device {options.device}")
    from cat_lm.pretrained.loading import quiet_transformers
    from eval.common.provenance import provenance
    from eval.speed.timing import describe, open_device

    quiet_transformers()
    device = open_device(options.device, options.threads)
    started = provenance()
    found = {"conv": _conv, "train": _train, "decode": _decode}[options.benchmark](options, device)
    head = {"format": 1, "benchmark": options.benchmark, **started, "device": describe(device)}
    return {**head, "repeats": options.repeats, **found}


def _conv(options: argparse.Namespace, device: Any) -> dict[str, Any]:
    from eval.speed.conv import ConvOptions, conv_speed

    options.repeats = options.repeats or {"cpu": 10, "cuda": 100}[device.type]
    shapes = options.shape or SHAPES[device.type]
    for sizes in shapes:
        given = f"--shape {','.join(map(str, sizes))}"
        if QKV in options.conv_type and sizes[3] < 2:
            raise UserError(f"{given}: has no two channels to rotate; {QKV} needs D of 2 or more")
        _check_room(given, 4 * math.prod(sizes), device)
    asked = (options.dtype, options.conv_type, options.windows, options.kernels, options.repeats)
    return conv_speed(ConvOptions(shapes, *asked), device)


def _train(options: argparse.Namespace, device: Any) -> dict[str, Any]:
    from eval.speed.train import TrainCase, train_speed

    length = options.context_length or SIZES[options.size]["context_length"]
    size = _model_size(options, device, length)
    case = TrainCase(size, options.batch_size, length, options.optimizer, options.compile)
    return train_speed(case, options.models, options.repeats, options.peak_tflops)


def _decode(options: argparse.Namespace, device: Any) -> dict[str, Any]:
    from eval.speed.decode import DecodeCase, decode_speed

    size = _model_size(options, device, max(options.prompts))
    counts = options.new_tokens, options.uncached_tokens
    cases = [DecodeCase(size, options.batch_size, prompt, *counts) for prompt in options.prompts]
    return decode_speed(cases, options.models, options.repeats)


def _model_size(options: argparse.Namespace, device: Any, positions: int) -> Any:
    """Return the size of the models, having checked that there is room for each."""
    from eval.speed.models import ModelSize

    named = SIZES[options.size]
    hidden_size = options.hidden_size or named["hidden_size"]
    heads, layers = options.heads or named["heads"], options.layers or named["layers"]
    if hidden_size % heads:
        raise UserError(f"--hidden-size {hidden_size}: must be a multiple of --heads {heads}")
    how = (options.vocab_size, options.window, options.dtype, str(device), options.attention)
    size = ModelSize(layers, hidden_size, heads, *how)
    what = f"a model of --hidden-size {hidden_size}, --layers {layers}"
    for name in options.models:
        _check_room(what, size.num_parameters(name, positions) * size.itemsize, device)
    return size


def _check_room(what: str, size: int, device: Any) -> None:
    """Raise UserError where not even the numbers themselves have room, before they are made."""
    from cat_lm.training.preflight.facts import free_memory

    if size > (free := free_memory(device)):
        raise UserError(
            f"{what}: takes {size / GIB:,.1f} GiB, but {free / GIB:,.1f} GiB of memory are free"
        )


@command
def main() -> None:
    options = _parser().parse_args()
    from cat_lm.core.files import write_json
    from cat_lm.core.outputs import claim_file
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
