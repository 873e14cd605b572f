"""`python -m eval.speed conv|train|decode|engine|stacks|data|checkpoint [--json FILE]`: speed.

Exit codes: 0 everything asked for was measured, 1 something was wrong and is refused, 2 bad input.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cat_lm import limits
from cat_lm.cli import Parser, number, output_file, path, whole, whole_numbers
from cat_lm.errors import UserError, command
from cat_lm.host import GIB
from eval.speed.arguments import names, shape
from eval.speed.choices import (
    DTYPES,
    KERNELS,
    QKV_KIND,
    SHAPES,
    SIZES,
    VOCAB_SIZE,
    conv_types,
    decoding_models,
    default_models,
    models,
    own_models,
)
from eval.speed.data import command as data


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m eval.speed", description="Speed and memory, measured side by side."
    )
    benchmarks = parser.add_subparsers(dest="benchmark", required=True)
    _add_conv(benchmarks.add_parser("conv", help="the convolutions, beside torch's and others'"))
    _add_train(benchmarks.add_parser("train", help="a training step of each model"))
    _add_decode(benchmarks.add_parser("decode", help="greedy decoding with and without the cache"))
    _add_checkpoint(benchmarks.add_parser("checkpoint", help="saving and loading checkpoints"))
    _add_stacks(benchmarks.add_parser("stacks", help="small models of recall trained as one"))
    models = list(benchmarks.choices.values())
    _add_engine(benchmarks.add_parser("engine", help="a run's own step, and its peak memory"))
    data.add_arguments(
        benchmarks.add_parser("data", help="tokenization, preparation, loader, opening")
    )
    for parser_ in models:
        parser_.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, …")
        parser_.add_argument(
            "--threads", type=whole(limits.CORES), metavar="N", help="of a CPU; default: all"
        )
    for parser_ in benchmarks.choices.values():
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
        type=whole_numbers(limits.WINDOW, "3,4,8"),
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
        type=whole(limits.REPEATS),
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
    parser.add_argument("--batch-size", type=whole(limits.BATCH), metavar="N")
    parser.add_argument("--repeats", type=whole(limits.REPEATS), default=repeats, metavar="N")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument(
        "--attention", choices=("sdpa", "eager", "flash_attention_2"), default="sdpa"
    )


def _add_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=SIZES, default="small")
    sizes = {"hidden-size": limits.HIDDEN_SIZE, "layers": limits.LAYERS, "heads": limits.HEADS}
    for name, allowed in sizes.items():
        parser.add_argument(
            f"--{name}", type=whole(allowed), metavar="N", help="default: the size's"
        )
    parser.add_argument(
        "--vocab-size", type=whole(limits.VOCABULARY), default=VOCAB_SIZE, metavar="N"
    )
    parser.add_argument("--window", type=whole(limits.WINDOW), default=21, metavar="W")


def _add_train(parser: argparse.ArgumentParser) -> None:
    _add_model(parser, tuple(models()), repeats=5)
    parser.set_defaults(batch_size=4)
    parser.add_argument(
        "--context-length", type=whole(limits.CONTEXT), metavar="N", help="default: the size's"
    )
    parser.add_argument("--optimizer", action="store_true", help="with AdamW's update")
    parser.add_argument("--compile", action="store_true", help="under torch.compile")
    parser.add_argument(
        "--peak-tflops",
        type=number(limits.TFLOPS),
        metavar="X",
        help="of the device in this dtype, for MFU (default: by its name in bf16)",
    )


def _add_decode(parser: argparse.ArgumentParser) -> None:
    _add_model(parser, decoding_models(), repeats=3)
    parser.set_defaults(batch_size=1)
    parser.add_argument(
        "--prompts",
        type=whole_numbers(limits.CONTEXT, "256,1024"),
        default=(2048, 16384),
        metavar="LIST",
        help="tokens of the prompts (default: 2048,16384, which takes a CPU long: try 256,1024)",
    )
    parser.add_argument(
        "--new-tokens",
        type=whole(limits.NEW_TOKENS.at_least(2)),
        default=32,
        metavar="N",
        help="with cache; the prompt's pass gives the first of them",
    )
    parser.add_argument(
        "--uncached-tokens",
        type=whole(limits.NEW_TOKENS),
        default=4,
        metavar="N",
        help="without cache",
    )


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    known = own_models()
    usual = known[1]  # after the one without convolutions
    parser.add_argument(
        "--model",
        choices=known,
        default=usual,
        help=f"of {', '.join(known)} (default: {usual})",
        metavar="NAME",
    )
    _add_size(parser)
    parser.add_argument(
        "--repeats", type=whole(limits.REPEATS), default=5, metavar="N", help="default: 5"
    )
    parser.add_argument(
        "--zero-stage", type=whole(limits.Range(0, 3)), default=0, help="default: 0"
    )
    parser.add_argument(
        "--scratch", type=path, metavar="DIR", help="where to save (default: the system's)"
    )
    parser.set_defaults(dtype="float32", attention="sdpa")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    """One rank on the device that training takes: there is nothing to choose."""
    parser.add_argument("config", type=path, metavar="CONFIG.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument(
        "--repeats", type=whole(limits.REPEATS), default=5, metavar="N", help="default: 5"
    )
    parser.set_defaults(device="auto", threads=None)


def _add_stacks(parser: argparse.ArgumentParser) -> None:
    from cat_lm import mixers
    from eval.recall.ranges import RANGES

    parser.add_argument("--task", default="mqar", help="of eval.recall (default: mqar)")
    known = tuple(mixers.names())
    parser.add_argument(
        "--mixers",
        type=names(known),
        default=known,
        metavar="LIST",
        help=f"of {', '.join(known)} (default: all)",
    )
    parser.add_argument(
        "--models",
        type=whole_numbers(limits.SAMPLES, "1,4,16"),
        default=(1, 4, 16),
        metavar="LIST",
        help="how many are trained as one (default: 1,4,16)",
    )
    for name, default in (("d_model", 64), ("seq_len", 64), ("batch_size", 512)):
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=whole(RANGES[name]),
            default=default,
            metavar="N",
            help=f"default: {default}",
        )
    parser.add_argument(
        "--repeats", type=whole(limits.REPEATS), default=5, metavar="N", help="default: 5"
    )


def run_conv(options: argparse.Namespace, device: Any) -> dict[str, Any]:
    from eval.speed.conv.measure import ConvOptions, conv_speed

    options.repeats = options.repeats or {"cpu": 10, "cuda": 100}[device.type]
    shapes = options.shape or SHAPES[device.type]
    for sizes in shapes:
        _check_room(f"--shape {','.join(map(str, sizes))}", 4 * math.prod(sizes), device)
    asked = ConvOptions(
        shapes=shapes,
        dtypes=options.dtype,
        conv_types=options.conv_type,
        windows=options.windows,
        kernels=options.kernels,
        repeats=options.repeats,
        cuda_graphs=not options.eager,
    )
    return conv_speed(asked, device)


def run_train(options: argparse.Namespace, device: Any) -> dict[str, Any]:
    from eval.speed.model.train import TrainCase, train_speed

    context_length = options.context_length or SIZES[options.size]["context_length"]
    case = TrainCase(
        _model_size(options, device, options.models, context_length),
        options.batch_size,
        context_length,
        options.optimizer,
        options.compile,
    )
    return train_speed(case, options.models, options.repeats, options.peak_tflops)


def run_decode(options: argparse.Namespace, device: Any) -> dict[str, Any]:
    from eval.speed.model.decode import DecodeCase, decode_speed

    size = _model_size(options, device, options.models, max(options.prompts))
    cases = [
        DecodeCase(size, options.batch_size, prompt, options.new_tokens, options.uncached_tokens)
        for prompt in options.prompts
    ]
    return decode_speed(cases, options.models, options.repeats)


def run_engine(options: argparse.Namespace, device: Any) -> dict[str, Any]:
    from eval.speed.model.engine import engine_speed

    return engine_speed(options.config, options.overrides, options.repeats)


def run_stacks(options: argparse.Namespace, device: Any) -> dict[str, Any]:
    from eval.speed.model.stacks import StackOptions, stacks_speed

    asked = StackOptions(
        task=options.task,
        mixers=options.mixers,
        sizes=options.models,
        d_model=options.d_model,
        seq_len=options.seq_len,
        batch_size=options.batch_size,
        repeats=options.repeats,
    )
    return stacks_speed(asked, device)


def _check_room(what: str, size: int, device: Any) -> None:
    """Raise UserError where not even the numbers themselves have room, before they are made."""
    from cat_lm.training.preflight.facts import free_memory

    if size > (free := free_memory(device)):
        raise UserError(
            f"{what}: takes {size / GIB:,.1f} GiB, but {free / GIB:,.1f} GiB of memory are free"
        )


def run_checkpoint(options: argparse.Namespace, device: Any) -> dict[str, Any]:
    from eval.speed.model.checkpoint import CONTEXT_LENGTH, checkpoint_speed

    if options.scratch is not None and not options.scratch.is_dir():
        raise UserError(f"--scratch {options.scratch}: no such folder")
    with tempfile.TemporaryDirectory(prefix="cat-lm-speed-", dir=options.scratch) as scratch:
        size = _model_size(options, device, (options.model,), CONTEXT_LENGTH)
        zero_stage, folder = options.zero_stage, Path(scratch)
        return checkpoint_speed(size, options.model, zero_stage, options.repeats, folder)


def _model_size(
    options: argparse.Namespace, device: Any, names: Sequence[str], positions: int
) -> Any:
    """Make the size of the models of these names, all of which there is room for."""
    from eval.speed.model.build import ModelSize

    named = SIZES[options.size]
    hidden_size = options.hidden_size or named["hidden_size"]
    heads = options.heads or named["heads"]
    if hidden_size % heads:
        raise UserError(f"--hidden-size {hidden_size}: must be a multiple of --heads {heads}")
    layers = options.layers or named["layers"]
    size = ModelSize(
        layers=layers,
        hidden_size=hidden_size,
        heads=heads,
        vocab_size=options.vocab_size,
        window=options.window,
        dtype=options.dtype,
        device=str(device),
        attention=options.attention,
    )
    what = f"a model of --hidden-size {hidden_size}, --layers {layers}"
    for name in names:
        parameters = size.num_parameters(name, positions)
        _check_room(what, parameters * (2 if options.dtype == "bfloat16" else 4), device)
    return size


@command
def main() -> None:
    options = _parser().parse_args()
    # Before torch loads: a thread that waits by spinning slows those that work on shared cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from cat_lm.io.files import write_json
    from cat_lm.pretrained import quiet_transformers
    from eval.common.outputs import claim_file
    from eval.common.provenance import provenance
    from eval.speed import tables
    from eval.speed.machine import describe, open_device

    if options.json:
        claim_file(options.json, "--json")
    quiet_transformers()
    device = open_device(options.device, options.threads)
    started = provenance()
    runs = {"conv": run_conv, "train": run_train, "decode": run_decode, "data": data.run}
    runs |= {"checkpoint": run_checkpoint, "engine": run_engine, "stacks": run_stacks}
    run = runs[options.benchmark]
    measured = run(options, device)
    record = {
        "benchmark": options.benchmark,
        **started,
        "device": describe(device),
        "repeats": options.repeats,
        **measured,
    }
    print(getattr(tables, f"{options.benchmark}_table")(record))
    if options.json:
        write_json(options.json, record)
        print(f"wrote {options.json}", file=sys.stderr)
    if refused := record.get("refused"):
        what = {"data": "tokenizers", "stacks": "stacks"}.get(options.benchmark, "kernels")
        print(f"error: {len(refused)} {what} are wrong and refused", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
