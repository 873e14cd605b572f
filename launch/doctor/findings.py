"""Findings of the checks of `launch.doctor`, and their printed form."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cat_lm.core.errors import UserError

WIDTH = 100
LABEL = 18


@dataclass(frozen=True)
class Finding:
    """One fact about a machine or a run.

    Attributes:
        topic: its subject, such as "packages" or "device".
        text: the fact for people; empty if there is only a problem.
        name, value: the same fact for programs.
        problem: the problem and a remedy, or None.
        broken: True if training cannot run because of the problem.
    """

    topic: str
    text: str
    name: str
    value: Any = None
    problem: str | None = None
    broken: bool = False


def run_check(check: Callable[..., Iterable[Finding]], *arguments: Any) -> list[Finding]:
    """Return the findings of a check; if it raises, those before the error, and the error."""
    name = check.__name__
    findings: list[Finding] = []
    try:
        for finding in check(*arguments):
            findings.append(finding)
        return findings
    except UserError as error:
        problem = str(error)
    except Exception as error:
        message = " ".join(str(error).split()) or "no message"
        problem = f"the check failed with {type(error).__name__}: {message}"
    return [*findings, Finding(name.replace("_", " "), "", name, problem=problem, broken=True)]


def format_findings(findings: Sequence[Finding], verdict: str | None) -> str:
    """Return the text of the findings by topic, then the problems, then the verdict.

    Args:
        verdict: the sentence that is true if nothing is broken; None for no verdict.
    """
    lines = []
    for topic in dict.fromkeys(finding.topic for finding in findings):
        # Short facts share a line; each longer one has its own.
        parts = [f.text for f in findings if f.topic == topic and f.text]
        paragraphs = ["; ".join(parts)] if all(len(p) < 45 for p in parts) else parts
        for place, paragraph in enumerate(paragraphs):
            lines += _wrap(paragraph, ("" if place else topic).ljust(LABEL), LABEL)
    wrong = sorted((f for f in findings if f.problem), key=lambda finding: not finding.broken)
    for finding in wrong:
        mark = "BROKEN: " if finding.broken else "note: "
        lines += _wrap(f"{finding.topic}: {finding.problem}", mark, 8)
    broken = sum(finding.broken for finding in wrong)
    if broken and verdict:
        verdict = f"{broken} broken: {verdict.replace(' can ', ' cannot ', 1)}"
    return "\n".join(lines + ([verdict] if verdict else []))


def _wrap(text: str, first: str, indent: int) -> list[str]:
    indents = {"initial_indent": first, "subsequent_indent": " " * indent}
    # Paths and options must stay whole.
    return textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False, **indents)
