"""`python -m launch.doctor [CONFIG.yaml]`: check this machine, and whether training runs here.

The findings are versions with their supported ranges, devices, compiler, optional packages,
attention implementations, DeepSpeed, disk space, and the backend of each convolution. With a
configuration they include the run's data, model, precision and backends. All problems are shown
together, each with a remedy. `--ranks 64 --device h100` checks the configuration on this number of
ranks instead, and estimates its costs; README.md has the equations.
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
from launch.doctor.findings import format_findings, run_check

if TYPE_CHECKING:
    from launch.doctor.findings import Finding


def parser() -> Parser:
    """Return the command's parser."""
    result = Parser(
        prog="python -m launch.doctor",
        description="Check this machine, the backends, and whether training can run here.",
        epilog="Exit codes: 0 training can run, here or on --ranks; 1 something that it needs is "
        "broken; 2 bad input.",
    )
    add = result.add_argument
    add("config", nargs="?", help="YAML file of a run to check")
    add(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="values of configuration keys, which replace those of the file; the last one wins",
    )
    add("--json", type=output_file, metavar="FILE", help="JSON file for the findings")
    add(
        "--ranks",
        type=whole_numbers(numbers.RANKS, "8,16,32", distinct=True),
        metavar="N[,N…]",
        help="check the run on this number of ranks (none is started) instead of this machine: "
        "batch, memory, schedule, checkpoints; with several numbers, print a table of costs",
    )
    add("--device", metavar="NAME", help="GPU of the ranks, for costs: h100, h200, a100, …")
    add(
        "--gpus-per-node",
        type=whole(numbers.PER_NODE),
        metavar="G",
        help="GPUs per node (default: 8)",
    )
    add(
        "--mfu",
        type=number(numbers.FRACTION, above=0),
        metavar="X",
        help=f"fraction of its peak that a GPU reaches (default: {ASSUMED_MFU}, assumed)",
    )
    add(
        "--interconnect",
        type=number(numbers.BANDWIDTH),
        metavar="GB/s",
        help=f"bandwidth from a GPU to other nodes (default: {ASSUMED_INTERCONNECT:g})",
    )
    return result


def collect_findings(config: RunConfig | None = None) -> list[Finding]:
    """Return all findings about this machine and, if it is given, a configuration on it.

    A check that fails is a finding, and does not raise.
    """
    from launch.doctor import machine, run

    findings = [finding for check in machine.ALL for finding in run_check(check)]
    for check in run.ALL if config else ():
        findings += run_check(check, config)
    return findings


def check_ranks(config: RunConfig, arguments: argparse.Namespace) -> tuple[list[Finding], str]:
    """Return the findings about `config` on `arguments.ranks` ranks, and the text to print."""
    from launch.doctor import ranks

    if arguments.device is None and len(arguments.ranks) > 1:
        raise UserError("--ranks: several numbers are a table of costs: give --device NAME")
    names = ("gpus_per_node", "mfu", "interconnect")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name)}
    if arguments.device:
        given["device"] = device_by_option(arguments.device)
    findings, table = ranks.collect_findings(config, arguments.ranks, Cluster(**given))
    is_one = len(arguments.ranks) == 1
    verdict = f"this run can start on {arguments.ranks[0]} ranks" if is_one else None
    return findings, "\n".join([format_findings(findings, verdict), *table])


@command
def main() -> None:
    arguments = parser().parse_intermixed_args()
    for name in ("device", "gpus_per_node", "mfu", "interconnect"):
        needed = "ranks" if name in ("device", "gpus_per_node") else "device"
        if getattr(arguments, name) is not None and getattr(arguments, needed) is None:
            raise UserError(f"--{name.replace('_', '-')}: says nothing without --{needed}")
    if arguments.ranks and not arguments.config:
        raise UserError("--ranks: needs a run's configuration: CONFIG.yaml --ranks …")
    # Set it before torch is imported, as in training.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    config = load_config(arguments.config, arguments.overrides) if arguments.config else None
    announce(f"examining {arguments.config or 'this machine'}")
    if arguments.ranks is None:
        findings = collect_findings(config)
        page = format_findings(findings, "training can run here")
    else:
        findings, page = check_ranks(config, arguments)
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
