"""`python -m launch.plan CONFIG.yaml --gpus 64 --device h100`: what a run costs, before it runs.

Tokens a second, days, GPU-hours, memory of a rank, batch arithmetic and checkpoints, for one number
of GPUs or a table of several. How fast a GPU computes comes from a record that `eval.speed train`
made on one (`--measured`), else it is assumed, and the output says so. README.md has the equations.

Exit codes: 0 done, 2 bad input.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from cat_lm import limits
from cat_lm.cli import Parser, number, output_file, path, whole, whole_numbers
from cat_lm.config import RunConfig, load_config
from cat_lm.errors import UserError, command
from cat_lm.io.outputs import write_result
from cat_lm.training.devices import ASSUMED_INTERCONNECT, Device, device_by_option
from launch.plan.costs import (
    ASSUMED_MFU,
    ASSUMED_STORAGE,
    Cluster,
    Costs,
    Run,
    Speed,
    assumed_host_seconds,
    costs,
)


def achieved_speed(
    arguments: argparse.Namespace, config: RunConfig, device: Device, run: Run
) -> Speed:
    """How fast a GPU and its host are: by the record, else assumed."""
    if arguments.measured is not None:
        from launch.plan.measured import read_measured

        return read_measured(arguments.measured, config, run, device)
    peak = config.train.peak_tflops
    if peak is None and config.train.precision == "fp32":
        raise UserError(
            "train.precision=fp32: only peaks in bf16 are known; give train.peak_tflops=X, of one "
            f"{device.name} in fp32, or --measured RECORD.json"
        )
    peak = peak or device.tflops
    mfu = ASSUMED_MFU if arguments.mfu is None else arguments.mfu
    given = "this project's assumption" if arguments.mfu is None else "given by --mfu"
    line = (
        f"ASSUMED, nothing was measured: {mfu:.0%} of {peak:g} TFLOP/s (MFU; {given}); "
        "--measured takes a record of eval.speed train instead"
    )
    return Speed(mfu * peak * 1e12, assumed_host_seconds(config), (line,))


def vocabulary(config: RunConfig) -> int:
    """The configuration's, else that of its data."""
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    from cat_lm.data.opening import open_data

    try:
        return open_data(config)[0].vocab_size
    except UserError as error:
        raise UserError(f"{error}; without data, give model.vocab_size=N") from None


def make_plan(arguments: argparse.Namespace) -> tuple[Run, Cluster, list[Costs], Speed]:
    """Everything the output shows; all numbers of GPUs that are wrong are named at once."""
    config = load_config(arguments.config, arguments.overrides)
    if config.train.precision == "auto":
        config = config.with_precision("bf16")
    device = device_by_option(arguments.device)
    run = Run.of(config, vocabulary(config))
    speed = achieved_speed(arguments, config, device, run)
    network = (arguments.interconnect, arguments.storage)
    cluster = Cluster(device, arguments.gpus_per_node, speed.flops, *network, speed.host_seconds)
    found, errors = [], []
    for gpus in arguments.gpus:
        try:
            found.append(costs(run, cluster, gpus))
        except UserError as error:
            errors.append(str(error))
    if errors:
        lines = errors[0] if len(errors) == 1 else "".join(f"\n  {line}" for line in errors)
        raise UserError(f"{arguments.config}: {lines}")
    return run, cluster, found, speed


def parser() -> argparse.ArgumentParser:
    result = Parser(
        prog="python -m launch.plan",
        description="What a run costs on GPUs: tokens a second, days, memory, checkpoints.",
        epilog="launch/plan/README.md has the equations and what they assume.",
    )
    add = result.add_argument
    add("config", help="the run's YAML file")
    add("overrides", nargs="*", metavar="section.key=value", help="last one wins")
    add(
        "--gpus",
        type=whole_numbers(limits.RANKS, "8,16,32", distinct=True),
        required=True,
        metavar="N[,N…]",
        help="one number, or several for a table",
    )
    add("--device", required=True, metavar="NAME", help="h100, h200, a100, l40s, …")
    add("--gpus-per-node", type=whole(limits.PER_NODE), default=8, metavar="G", help="default: 8")
    speed = result.add_mutually_exclusive_group()
    speed.add_argument(
        "--mfu",
        type=number(limits.FRACTION, above=0),
        metavar="X",
        help=f"share of the peak that a GPU reaches (default: {ASSUMED_MFU}, an assumption)",
    )
    speed.add_argument(
        "--measured",
        type=path,
        metavar="RECORD.json",
        help="what eval.speed train --json wrote on such a GPU",
    )
    add(
        "--interconnect",
        type=number(limits.BANDWIDTH),
        default=ASSUMED_INTERCONNECT,
        metavar="GB/s",
        help=f"that a GPU sends to other nodes (default: {ASSUMED_INTERCONNECT:g})",
    )
    add(
        "--storage",
        type=number(limits.BANDWIDTH),
        default=ASSUMED_STORAGE,
        metavar="GB/s",
        help=f"that all nodes together write (default: {ASSUMED_STORAGE:g})",
    )
    add("--price-per-gpu-hour", type=number(limits.PRICE), metavar="P", help="in any currency")
    add("--json", type=output_file, metavar="FILE", help="where to write the same numbers")
    return result


@command
def main() -> None:
    arguments = parser().parse_intermixed_args()
    run, cluster, found, speed = make_plan(arguments)
    from launch.plan.text import render

    print(render(run, cluster, found, speed, arguments.price_per_gpu_hour))
    if arguments.json:
        record = {
            "config": run.config.model_dump(mode="json"),
            "parameters": run.parameters,
            "flops_per_token": run.flops_per_token,
            "cluster": asdict(cluster),
            "speed": speed.sources,
            "costs": [
                asdict(cost)
                | {"days": cost.days, "gpu_hours": cost.gpu_hours}
                | (
                    {"price": cost.gpu_hours * arguments.price_per_gpu_hour}
                    if arguments.price_per_gpu_hour
                    else {}
                )
                for cost in found
            ],
        }
        write_result(arguments.json, "--json", "python -m launch.plan", record)
        print(f"wrote {arguments.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
