"""`python -m launch.doctor [CONFIG.yaml]`: what this machine has, and whether training runs here.

`--dry-run ranks=64,device=h100` looks at the configuration on so many ranks instead.

Versions beside the supported ranges, devices, compiler, optional packages, attention
implementations, DeepSpeed, space, and the backend that computes each convolution with the reason.
With a configuration also that run's data, model, precision and convolutions. Everything that is
wrong is shown at once, each with what to do.

Exit codes: 0 training can run here, 1 something it needs is broken, 2 bad input.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cat_lm.cli import Parser, output_file
from cat_lm.config import RunConfig, load_config
from cat_lm.errors import UserError, command
from cat_lm.io.outputs import write_result

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


def render(findings: Sequence[Finding], what: str = "training can run here") -> str:
    """One screen: what was found by topic, then what is wrong and what to do about it.

    Args:
        what: the sentence that is true if nothing is broken.
    """
    lines = []
    for topic in dict.fromkeys(finding.topic for finding in findings):
        of_topic = [finding for finding in findings if finding.topic == topic]
        # Short facts share a line; each longer one has its own.
        parts = [finding.text for finding in of_topic if finding.text]
        paragraphs = ["; ".join(parts)] if all(len(p) < 45 for p in parts) else parts
        for number, paragraph in enumerate(paragraphs):
            label = topic if number == 0 else ""
            lines += textwrap.wrap(
                paragraph,
                WIDTH,
                initial_indent=label.ljust(LABEL),
                subsequent_indent=" " * LABEL,
                break_long_words=False,
                break_on_hyphens=False,
            )
    wrong = sorted(
        (finding for finding in findings if finding.problem), key=lambda finding: not finding.broken
    )
    for finding in wrong:
        mark = "BROKEN" if finding.broken else "note"
        lines += textwrap.wrap(
            f"{finding.topic}: {finding.problem}",
            WIDTH,
            initial_indent=f"{mark}: ",
            subsequent_indent=" " * 8,
            break_long_words=False,
            break_on_hyphens=False,
        )
    broken = sum(finding.broken for finding in wrong)
    lines.append(f"{broken} broken: {what.replace(' can ', ' cannot ', 1)}" if broken else what)
    return "\n".join(lines)


def dry_run(config: RunConfig | None, text: str) -> tuple[list[Finding], str]:
    """The findings about `config` on the ranks that `text` names, and what they would mean."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from launch.doctor import scale

    if config is None:
        raise UserError(f"--dry-run {text}: needs a run's configuration: CONFIG --dry-run …")
    asked = scale.DryRun.parse(text)
    return scale.examine(config, asked), f"this run can start on {asked.ranks} ranks"


def record(findings: Sequence[Finding], config: str | None) -> dict[str, Any]:
    """The findings as JSON."""
    return {
        "config": config,
        "can_train": not any(finding.broken for finding in findings),
        "findings": [asdict(finding) for finding in findings],
    }


@command
def main() -> None:
    parser = Parser(
        prog="python -m launch.doctor",
        description="What this machine has, which backends serve, and whether training runs here.",
        epilog="Exit codes: 0 training can run, here or on the ranks of --dry-run, 1 something it "
        "needs is broken, 2 bad input.",
    )
    parser.add_argument("config", nargs="?", help="a run's YAML file, to look at that very run")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="last one wins")
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="where to write the findings"
    )
    parser.add_argument(
        "--dry-run",
        metavar="ranks=N[,gpus-per-node=G][,device=NAME]",
        help="look at the run on so many ranks, of which none is started, instead of at this "
        "machine: batch, samples, memory, partitions, schedule, checkpoints",
    )
    arguments = parser.parse_intermixed_args()
    config = load_config(arguments.config, arguments.overrides) if arguments.config else None
    if arguments.dry_run is None:
        findings, what = examine(config), "training can run here"
    else:
        findings, what = dry_run(config, arguments.dry_run)
    print(render(findings, what))
    if arguments.json:
        values = record(findings, arguments.config)
        write_result(arguments.json, "--json", "python -m launch.doctor", values)
        print(f"wrote {arguments.json}", file=sys.stderr)
    if any(finding.broken for finding in findings):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
