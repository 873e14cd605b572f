"""The rows of `faults.yaml`, and what is done to the source for one: a break, or a probe."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

LIST = Path(__file__).with_name("faults.yaml")
# Copies of the code that a run makes of itself have no tests to import from.
_PROBE = (
    '{indent}with __import__("contextlib").suppress(ImportError): '
    '__import__("tests.mutations.probe", fromlist=["hit"]).hit("{name}")\n'
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Fault:
    """A deliberate break of one line.

    Attributes:
        file: relative to the repository.
        old, new: `old` stands once in the file.
        meaning: what would hurt whom.
        tests: files to run where no probe can tell which tests reach the line.
    """

    name: str
    file: str
    old: str
    new: str
    meaning: str
    tests: tuple[str, ...] = ()

    def problem(self, root: Path) -> str:
        """Say why the fault does not apply to a checkout; "" where it does."""
        path = root / self.file
        if not path.is_file():
            return f"{self.file}: no such file"
        count = path.read_text(encoding="utf-8").count(self.old)
        return "" if count == 1 else f"{self.file}: has {self.old!r} {count} times, must be once"

    def broken(self, source: str) -> str:
        """Return the source with the fault."""
        return source.replace(self.old, self.new)


def read_faults() -> list[Fault]:
    """Read the list, in its order."""
    rows = yaml.safe_load(LIST.read_text(encoding="utf-8"))
    return [Fault(**row | {"tests": tuple(row.get("tests", ()))}) for row in rows]


def probed(source: str, faults: Iterable[Fault]) -> str:
    """Return Python source with a probe before the innermost statement of each fault.

    Raises:
        ValueError: a fault's line is in no function.
    """
    tree, lines = ast.parse(source), source.splitlines(keepends=True)
    probes = []
    for fault in faults:
        line = source[: source.index(fault.old)].count("\n") + 1
        statement = _statement_at(tree, lines, line)
        if statement is None:
            raise ValueError(f"{fault.name}: its line is in no function; name tests")
        indent = " " * statement.col_offset
        probes.append((statement.lineno - 1, _PROBE.format(indent=indent, name=fault.name)))
    for place, probe in sorted(probes, reverse=True):
        lines.insert(place, probe)
    return "".join(lines)


def _statement_at(tree: ast.Module, lines: list[str], line: int) -> ast.stmt | None:
    """Find the innermost statement of a line, in a function, before which a line may be put.

    For a function's own header, that is the first statement of its body.
    """
    node: ast.AST = tree
    found, is_inside = None, False
    while inner := next((n for n in _parts(node) if n.lineno <= line <= n.end_lineno), None):
        is_inside = is_inside or isinstance(node, _FUNCTIONS)
        if is_inside and isinstance(inner, ast.stmt) and _may_follow(inner, lines):
            found = inner
        node = inner
    if isinstance(node, _FUNCTIONS):
        return next(s for s in node.body if _may_follow(s, lines))
    return found


def _parts(node: ast.AST) -> Iterator[ast.stmt | ast.ExceptHandler]:
    """Give the statements that a node holds, those of its cases and handlers as well."""
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.match_case):
            yield from part.body
        elif isinstance(part, ast.stmt | ast.ExceptHandler):
            yield part


def _may_follow(statement: ast.stmt, lines: list[str]) -> bool:
    """Tell whether a line may be put before a statement: not before `elif`, nor after a colon."""
    text = lines[statement.lineno - 1]
    begins = not text[: statement.col_offset].strip() and not text.lstrip().startswith("elif ")
    is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return begins and not is_docstring
