"""`python -m launch.doctor [CONFIG.yaml]`: what this machine has, and whether training runs here.

`--ranks 64 --device h100` looks at the configuration on so many ranks instead, and at its cost.
README.md has the equations.

Versions beside the supported ranges, devices, compiler, optional packages, attention
implementations, DeepSpeed, space, and the backend that computes each convolution with the reason.
With a configuration also that run's data, model, precision and convolutions. Everything that is
wrong is shown at once, each with what to do.

Exit codes: 0 training can run here, 1 something it needs is broken, 2 bad input.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cat_lm.config import RunConfig, load_config
from cat_lm.core import numbers
from cat_lm.core.cli import Parser, number, output_file, whole, whole_numbers
from cat_lm.core.errors import UserError, command
from cat_lm.core.outputs import write_result
from cat_lm.training.devices import ASSUMED_INTERCONNECT, device_by_option
from launch.doctor.costs import ASSUMED_MFU

if TYPE_CHECKING:
    from launch.doctor.findings import Finding

WIDTH = 100
LABEL = 18


def examine(config: RunConfig | None = None) -> list[Finding]:
    """All findings about this machine and, given one, a run's configuration on it.

    Plain data, so that findings of several hosts can be gathered and compared. No check raises: one
    that fails is a finding itself.
    """
    # Before torch loads, as in training.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from launch.doctor import machine, run_config
    from launch.doctor.findings import guarded

    findings = []
    for check in machine.ALL:
        findings += guarded(check)
    if config is not None:
        for check in run_config.ALL:
            findings += guarded(check, config)
    return findings


def render(findings: Sequence[Finding], what: str | None = "training can run here") -> str:
    """Return one screen: findings by topic, then what is wrong and what to do about it.

    Args:
        what: the sentence that is true if nothing is broken; None: there is no such question.
    """
    lines = []
    for topic in dict.fromkeys(finding.topic for finding in findings):
        # Short facts share a line; each longer one has its own.
        parts = [f.text for f in findings if f.topic == topic and f.text]
        paragraphs = ["; ".join(parts)] if all(len(p) < 45 for p in parts) else parts
        for place, paragraph in enumerate(paragraphs):
            label = topic if place == 0 else ""
            lines += _wrap(paragraph, label.ljust(LABEL), LABEL)
    wrong = sorted((f for f in findings if f.problem), key=lambda finding: not finding.broken)
    for finding in wrong:
        mark = "BROKEN: " if finding.broken else "note: "
        lines += _wrap(f"{finding.topic}: {finding.problem}", mark, 8)
    broken = sum(finding.broken for finding in wrong)
    if what is not None:
        lines.append(f"{broken} broken: {what.replace(' can ', ' cannot ', 1)}" if broken else what)
    return "\n".join(lines)


def _wrap(text: str, first: str, indent: int) -> list[str]:
    indents = {"initial_indent": first, "subsequent_indent": " " * indent}
    # Paths and options must stay whole.
    return textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False, **indents)


def look_ahead(
    config: RunConfig | None, arguments: argparse.Namespace
) -> tuple[list[Finding], str]:
    """Look at `config` on the ranks that are asked for: the findings, and what is printed."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from launch.doctor import scale

    if config is None:
        raise UserError("--ranks: needs a run's configuration: CONFIG.yaml --ranks …")
    if arguments.device is None and len(arguments.ranks) > 1:
        raise UserError("--ranks: several numbers are a table of costs: give --device NAME")
    device = None if arguments.device is None else device_by_option(arguments.device)
    given = {name: getattr(arguments, name) for name in ("gpus_per_node", "mfu", "interconnect")}
    given = {name: value for name, value in given.items() if value is not None}
    asked = scale.Scale(arguments.ranks, device=device, **given)
    findings, lines = scale.examine(config, asked)
    question = None if lines else f"this run can start on {arguments.ranks[0]} ranks"
    return findings, "\n".join([render(findings, question), *lines])


def record(findings: Sequence[Finding], config: str | None) -> dict[str, Any]:
    """The findings as JSON."""
    return {
        "config": config,
        "can_train": not any(finding.broken for finding in findings),
        "findings": [asdict(finding) for finding in findings],
    }


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


@command
def main() -> None:
    arguments = parser().parse_intermixed_args()
    for name in ("device", "gpus_per_node", "mfu", "interconnect"):
        needed = "ranks" if name in ("device", "gpus_per_node") else "device"
        if getattr(arguments, name) is not None and getattr(arguments, needed) is None:
            raise UserError(f"--{name.replace('_', '-')}: says nothing without --{needed}")
    config = load_config(arguments.config, arguments.overrides) if arguments.config else None
    if arguments.ranks is None:
        findings = examine(config)
        text = render(findings)
    else:
        findings, text = look_ahead(config, arguments)
    print(text)
    if arguments.json:
        values = record(findings, arguments.config)
        write_result(arguments.json, "--json", "python -m launch.doctor", values)
        print(f"wrote {arguments.json}", file=sys.stderr)
    if any(finding.broken for finding in findings):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
