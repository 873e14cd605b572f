"""Findings of the checks of `launch.doctor`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from cat_lm.core.errors import UserError


@dataclass(frozen=True)
class Finding:
    """One fact about a machine.

    Attributes:
        topic: what it is about: "packages", "device", …
        text: the fact for people; empty where there is only a problem.
        problem: what is wrong and what to do, or None.
        broken: whether training cannot run because of it.
        name, value: the same fact for programs.
    """

    topic: str
    text: str
    name: str
    value: Any = None
    problem: str | None = None
    broken: bool = False


def guarded(check: Callable[..., Iterable[Finding]], *arguments: Any) -> list[Finding]:
    """The findings of a check; what it found before it failed, and the failure as one more."""
    name = check.__name__
    findings: list[Finding] = []
    try:
        for finding in check(*arguments):
            findings.append(finding)
    except UserError as error:
        problem = str(error)
    except Exception as error:
        message = " ".join(str(error).split()) or "no message"
        problem = f"the check failed with {type(error).__name__}: {message}"
    else:
        return findings
    return [*findings, Finding(name.replace("_", " "), "", name, problem=problem, broken=True)]
