"""`python -m launch.doctor [CONFIG.yaml]`: what this machine has, and whether training runs here.

Versions beside the supported ranges, devices, compiler, optional packages, attention
implementations, DeepSpeed, space, and the backend that computes each convolution with the reason.
With a configuration also that run's data, model, precision and convolutions. Everything that is
wrong is shown at once, each with what to do. `--ranks 64 --device h100` looks at the configuration
on so many ranks instead, and at its cost; README.md has the equations.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from cat_lm.config import RunConfig, load_config
from cat_lm.core import numbers
from cat_lm.core.cli import Parser, announce, number, output_file, whole, whole_numbers
from cat_lm.core.errors import UserError, command
from cat_lm.core.outputs import write_result
from cat_lm.training.devices import ASSUMED_INTERCONNECT, device_by_option
from launch.doctor.costs import ASSUMED_MFU, Cluster
from launch.doctor.findings import guarded, render

if TYPE_CHECKING:
    from launch.doctor.findings import Finding


def parser() -> Parser:
    """Return the command's parser."""
    result = Parser(
        prog="python -m launch.doctor",
        description="What this machine has, which backends serve, and whether training runs here.",
        epilog="Exit codes: 0 training can run, here or on --ranks, 1 something it needs is "
        "broken, 2 bad input.",
    )
    add = result.add_argument
    add("config", nargs="?", help="a run's YAML file, to look at that very run")
    add("overrides", nargs="*", metavar="section.key=value", help="last one wins")
    add("--json", type=output_file, metavar="FILE", help="where to write the findings")
    add(
        "--ranks",
        type=whole_numbers(numbers.RANKS, "8,16,32", distinct=True),
        metavar="N[,N…]",
        help="look at the run on so many ranks, of which none is started, instead of at this "
        "machine: batch, memory, schedule, checkpoints; several: a table of "
        "what they cost",
    )
    add("--device", metavar="NAME", help="that the ranks have, for costs: h100, h200, a100, …")
    add("--gpus-per-node", type=whole(numbers.PER_NODE), metavar="G", help="default: 8")
    add(
        "--mfu",
        type=number(numbers.FRACTION, above=0),
        metavar="X",
        help=f"share of the peak that a GPU reaches (default: {ASSUMED_MFU}, an assumption)",
    )
    add(
        "--interconnect",
        type=number(numbers.BANDWIDTH),
        metavar="GB/s",
        help=f"that a GPU sends to other nodes (default: {ASSUMED_INTERCONNECT:g})",
    )
    return result


def examine(config: RunConfig | None = None) -> list[Finding]:
    """Return all findings about this machine and, given one, a run's configuration on it.

    No check raises: one that fails is a finding itself.
    """
    from launch.doctor import machine, run

    findings = [finding for check in machine.ALL for finding in guarded(check)]
    for check in run.ALL if config else ():
        findings += guarded(check, config)
    return findings


def look_ahead(config: RunConfig, arguments: argparse.Namespace) -> tuple[list[Finding], str]:
    """Return the findings about `config` on the ranks that are asked for, and the page."""
    from launch.doctor import ranks

    if arguments.device is None and len(arguments.ranks) > 1:
        raise UserError("--ranks: several numbers are a table of costs: give --device NAME")
    names = ("gpus_per_node", "mfu", "interconnect")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name)}
    if arguments.device:
        given["device"] = device_by_option(arguments.device)
    findings, table = ranks.examine(config, arguments.ranks, Cluster(**given))
    is_one = len(arguments.ranks) == 1
    verdict = f"this run can start on {arguments.ranks[0]} ranks" if is_one else None
    return findings, "\n".join([render(findings, verdict), *table])


@command
def main() -> None:
    arguments = parser().parse_intermixed_args()
    for name in ("device", "gpus_per_node", "mfu", "interconnect"):
        needed = "ranks" if name in ("device", "gpus_per_node") else "device"
        if getattr(arguments, name) is not None and getattr(arguments, needed) is None:
            raise UserError(f"--{name.replace('_', '-')}: says nothing without --{needed}")
    if arguments.ranks and not arguments.config:
        raise UserError("--ranks: needs a run's configuration: CONFIG.yaml --ranks …")
    # Before torch loads, as in training.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    config = load_config(arguments.config, arguments.overrides) if arguments.config else None
    announce(f"examining {arguments.config or 'this machine'}")
    if arguments.ranks is None:
        findings = examine(config)
        page = render(findings, "training can run here")
    else:
        findings, page = look_ahead(config, arguments)
    print(page)
    broken = any(finding.broken for finding in findings)
    if arguments.json:
        values = {
            "config": arguments.config,
            "can_train": not broken,
            "findings": [asdict(finding) for finding in findings],
            "page": page.splitlines(),
        }
        write_result(arguments.json, "--json", "python -m launch.doctor", values)
        print(f"wrote {arguments.json}", file=sys.stderr)
    if broken:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
