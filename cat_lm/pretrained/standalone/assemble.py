"""Join definitions of several modules, and all that they use, into the text of one module.

Definitions are taken as they are written, with their comments. What one refers to by a name, or by
an attribute of an imported module, is taken too; imports of the package's own modules go, and other
imports are collected at the beginning. Two definitions of one name are told apart by the names of
their modules.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.util
import symtable
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = __name__.partition(".")[0]


class CannotAssemble(ValueError):
    """Raised where a definition is needed that must not be carried; says which needs it."""


@dataclass(frozen=True, order=True)
class Name:
    """A name of a module; of a module itself, where `name` is empty."""

    module: str
    name: str = ""

    @property
    def is_own(self) -> bool:
        return self.module.partition(".")[0] == PACKAGE


@dataclass
class Module:
    """The top level of a module: its definitions and imports by the names that they bind."""

    name: str
    lines: list[str] = field(init=False)
    statements: list[ast.stmt] = field(default_factory=list)
    definitions: set[str] = field(default_factory=set)
    imports: dict[str, Name] = field(default_factory=dict)
    type_imports: dict[str, Name] = field(default_factory=dict)

    def __post_init__(self) -> None:
        source = _path(self.name).read_text(encoding="utf-8")
        self.lines = source.splitlines(keepends=True)
        for statement in ast.parse(source).body:
            if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
                for part in statement.body:
                    self.type_imports |= _imported(part)
            elif isinstance(statement, ast.Import | ast.ImportFrom):
                self.imports |= _imported(statement)
            elif bound := set(_bound_by(statement)):
                self.statements.append(statement)
                self.definitions |= bound

    def rows(self, statement: ast.stmt) -> tuple[int, int]:
        """Return the first and last line of a statement, including the comments above it."""
        decorators = getattr(statement, "decorator_list", [])
        first = min(node.lineno for node in (statement, *decorators)) - 1
        while first > 0 and self.lines[first - 1].startswith("#"):
            first -= 1
        return first, statement.end_lineno


@functools.cache
def _read(module: str) -> Module:
    return Module(module)


def _path(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise CannotAssemble(f"{module}: there is no such module")
    return Path(spec.origin)


def _imported(statement: ast.stmt) -> dict[str, Name]:
    if isinstance(statement, ast.ImportFrom):
        return {a.asname or a.name: Name(statement.module, a.name) for a in statement.names}
    if isinstance(statement, ast.Import):
        return {a.asname or a.name.partition(".")[0]: Name(a.name) for a in statement.names}
    return {}


def _bound_by(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a module binds, or whose value it fills."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        filled = statement.value.func  # An example is TABLE.add(…).
        while isinstance(filled, ast.Attribute):
            filled = filled.value
        if isinstance(filled, ast.Name):
            yield filled.id
    elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for node in (node for target in targets for node in ast.walk(target)):
            if isinstance(node, ast.Name):
                yield node.id


@dataclass
class Reference:
    """A place in a module's text that refers to a definition or an import."""

    target: Name
    node: ast.expr
    hidden_by: frozenset[str]  # names that the functions around it bind themselves
    is_annotation: bool  # True for an annotation, which is text at run time
    is_late: bool  # whether it is looked up when a function runs, not when the module is loaded


class Assembly:
    """The definitions that some roots need.

    Args:
        stand_ins: replacements of definitions.
        carried: the modules that definitions may come from, or packages of them.
    """

    def __init__(self, stand_ins: Mapping[Name, Name], carried: Iterable[str]) -> None:
        self._stand_ins, self._carried = dict(stand_ins), tuple(carried)
        self._used: dict[str, Module] = {}
        # The references of each statement that is taken, by its module and first line.
        self._taken: dict[tuple[str, int], list[Reference]] = {}
        for name in stand_ins:
            if name.name not in self._module(name.module).definitions:
                raise CannotAssemble(f"{name.module}.{name.name}: there is no such definition")

    def add(self, root: Name, needed_by: str = "the caller") -> None:
        """Take a definition and all that it needs.

        Raises:
            CannotAssemble: one of them is of a module that is not carried.
        """
        todo = [(self._resolved(root), needed_by)]
        while todo:
            name, user = todo.pop()
            if not any(name.module == c or name.module.startswith(f"{c}.") for c in self._carried):
                raise CannotAssemble(f"{name.module}.{name.name} is not carried ({user} uses it)")
            module = self._module(name.module)
            # A name that is assigned again, or filled afterwards, needs all of its statements.
            for statement in module.statements:
                place = module.name, statement.lineno
                if name.name in _bound_by(statement) and place not in self._taken:
                    self._taken[place] = found = list(_References(self, module).of(statement))
                    user = f"{module.name}.{name.name}"
                    needed = (r.target for r in found if not r.is_annotation)
                    todo += [(target, user) for target in needed if target.is_own]

    def _module(self, name: str) -> Module:
        return self._used.setdefault(name, _read(name))

    def _resolved(self, name: Name) -> Name:
        """Follow imports, and replacements by stand-ins, to a name's definition."""
        if name in self._stand_ins:
            return self._stand_ins[name]
        if not name.is_own or not name.name:
            return name
        module = self._module(name.module)
        if name.name in module.definitions:
            return name
        # A package that loads its names when they are asked for imports them for type checkers.
        source = module.imports.get(name.name) or module.type_imports.get(name.name)
        if source is None or source == name:
            return Name(f"{name.module}.{name.name}")  # It is a module of a package.
        return self._resolved(source)

    def text(self, calls: Iterable[tuple[Name, Name]] = ()) -> str:
        """Write the module: imports, then definitions, dependencies first.

        Args:
            calls: functions that are called at the end, with an argument each.
        """
        names, parts = self._final_names(), []
        imports = {"Any": Name("typing", "Any")}
        for module, statement in self._in_order():
            references = self._taken[module.name, statement.lineno]
            for found in references:
                if not found.target.is_own:
                    _add_import(imports, found)
            parts.append(_rewritten(module, statement, references, names))
        for function, argument in calls:
            called = (names[self._resolved(name)] for name in (function, argument))
            parts.append("{}({})\n".format(*called))
        lines = sorted(_import_line(bound, target) for bound, target in imports.items())
        text = "\n".join(lines) + "\n\n\n" + "\n\n".join(parts)
        _check_names(text)
        return text

    def _in_order(self) -> list[tuple[Module, ast.stmt]]:
        """Return the statements in module order, with dependencies needed at load time first."""
        every = [
            (module, statement)
            for module in self._modules_in_order()
            for statement in module.statements
            if (module.name, statement.lineno) in self._taken
        ]
        defining: dict[Name, list[tuple[Module, ast.stmt]]] = {}
        for module, statement in every:
            for name in _bound_by(statement):
                defining.setdefault(Name(module.name, name), []).append((module, statement))
        ordered: dict[tuple[str, int], tuple[Module, ast.stmt]] = {}
        begun: set[tuple[str, int]] = set()

        def emit(module: Module, statement: ast.stmt) -> None:
            place = module.name, statement.lineno
            if place in begun:
                return
            begun.add(place)
            for found in self._taken[place]:
                if not (found.is_late or found.is_annotation):
                    for needed in defining.get(found.target, ()):
                        emit(*needed)
            ordered[place] = module, statement

        for module, statement in every:
            emit(module, statement)
        return list(ordered.values())

    def _modules_in_order(self) -> list[Module]:
        """Order modules so that imported ones come before those that import them."""
        ordered: dict[str, Module] = {}
        begun: set[str] = set()

        def visit(module: Module) -> None:
            begun.add(module.name)
            for bound in module.imports:
                target = self._resolved(Name(module.name, bound))
                if target.module in self._used and target.module not in begun:
                    visit(self._used[target.module])
            ordered[module.name] = module

        for module in list(self._used.values()):
            if module.name not in begun:
                visit(module)
        return list(ordered.values())

    def _final_names(self) -> dict[Name, str]:
        """Return the final name of each definition in the assembled module."""
        owners: dict[str, list[str]] = {}
        for module, line in self._taken:
            statement = next(s for s in self._module(module).statements if s.lineno == line)
            for name in _bound_by(statement):
                if module not in owners.setdefault(name, []):
                    owners[name].append(module)
        every = [found for references in self._taken.values() for found in references]
        # Names that imports have, and those that functions that refer to a definition have.
        imported = {_bound_name(found) for found in every if not found.target.is_own}
        hidden = {(f.target, name) for f in every if f.target.is_own for name in f.hidden_by}
        final = {}
        for name, modules in owners.items():
            is_shared = len(modules) > 1 or name in imported or hasattr(builtins, name)
            for module in modules:
                own = Name(module, name)
                if is_shared or (own, name) in hidden:
                    underscore = "_" if name.startswith("_") else ""
                    stem = module.rpartition(".")[2]
                    final[own] = f"{underscore}{stem}_{name.removeprefix('_')}"
                else:
                    final[own] = name
        return final


class _References:
    """Finds what a statement refers to, and how names are bound where it does."""

    def __init__(self, assembly: Assembly, module: Module) -> None:
        self._assembly, self._module = assembly, module
        self._fields: set[ast.AST] = set()  # What the bodies of classes assign to.

    def of(self, statement: ast.stmt) -> Iterator[Reference]:
        yield from self._walk(statement, {}, frozenset())

    def _walk(
        self,
        node: ast.AST,
        imports: dict[str, Name],
        hidden: frozenset[str],
        annotates: bool = False,
        is_late: bool = False,
    ) -> Iterator[Reference]:
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            bound = {part.arg for part in ast.walk(node.args) if isinstance(part, ast.arg)}
            bound |= set(_stored(node))
            for part in ast.walk(node):
                imports = imports | _imported(part)
            hidden = hidden | (bound - imports.keys())
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            hidden = hidden | set(_stored(node))
        elif isinstance(node, ast.ClassDef):
            # A field may be named like a module without being a use of it.
            assigned = (part for part in node.body if isinstance(part, ast.Assign | ast.AnnAssign))
            for part in assigned:
                self._fields.update(getattr(part, "targets", None) or [part.target])
        elif target := self._target(node, imports, hidden):
            yield Reference(target, node, hidden, annotates, is_late)
            return
        for name, value in ast.iter_fields(node):
            is_text = annotates or name in ("annotation", "returns")
            is_body = name == "body" and isinstance(node, ast.FunctionDef | ast.Lambda)
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.AST):
                    later = is_late or is_body
                    yield from self._walk(part, imports, hidden, is_text, later)

    def _target(
        self, node: ast.AST, imports: dict[str, Name], hidden: frozenset[str]
    ) -> Name | None:
        """Return the definition that a name or a module's attribute refers to; None for a local."""
        if isinstance(node, ast.Attribute):
            owner = self._target(node.value, imports, hidden)
            is_of_module = owner is not None and owner.is_own and not owner.name
            return self._assembly._resolved(Name(owner.module, node.attr)) if is_of_module else None
        if not isinstance(node, ast.Name) or node in self._fields:
            return None
        if node.id in imports:
            target = imports[node.id]
            return self._assembly._resolved(target) if target.is_own else None
        module = self._module
        if node.id in hidden:
            return None
        if node.id in module.definitions or node.id in module.imports:
            return self._assembly._resolved(Name(module.name, node.id))
        target = module.type_imports.get(node.id)
        return self._assembly._resolved(target) if target is not None else None


def _stored(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            yield part.id


def _bound_name(reference: Reference) -> str:
    return reference.node.id if isinstance(reference.node, ast.Name) else ""


def _add_import(imports: dict[str, Name], reference: Reference) -> None:
    bound, target = _bound_name(reference), reference.target
    if imports.setdefault(bound, target) != target:
        raise CannotAssemble(f"{bound} is imported from {imports[bound]} and from {target}")


def _import_line(bound: str, target: Name) -> str:
    if not target.name:
        return f"import {target.module}" + (f" as {bound}" if bound != target.module else "")
    return f"from {target.module} import {target.name}" + (
        f" as {bound}" if bound != target.name else ""
    )


def _rewritten(
    module: Module,
    statement: ast.stmt,
    references: Iterable[Reference],
    names: Mapping[Name, str],
) -> str:
    """Write a statement with the final names, and without imports of the package's modules."""
    first, last = module.rows(statement)
    lines = [line.encode() for line in module.lines]
    # An annotation may name a class that is not carried.
    own = [r for r in references if r.target.is_own]
    for reference in own:
        if reference.target not in names and not reference.is_annotation:
            raise CannotAssemble(f"{module.name}: {reference.target} is not carried")
    edits = [(r.node, names.get(r.target, "Any")) for r in own]
    # From the end to the beginning, so that positions stay right.
    for node, name in sorted(edits, key=lambda edit: _start(edit[0]), reverse=True):
        row, (begin, end) = node.lineno - 1, (node.col_offset, node.end_col_offset)
        before = lines[row][begin:end].decode(errors="replace")
        if node.end_lineno != node.lineno or before != ast.unparse(node):
            raise CannotAssemble(f"{module.name}: line {node.lineno}: cannot rename {before!r}")
        lines[row] = lines[row][:begin] + name.encode() + lines[row][end:]
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        row, name = statement.lineno - 1, names[Name(module.name, statement.name)]
        lines[row] = lines[row].replace(f" {statement.name}".encode(), f" {name}".encode(), 1)
    for node in ast.walk(statement):
        if any(target.is_own for target in _imported(node).values()):
            lines[node.lineno - 1 : node.end_lineno] = [b""] * (node.end_lineno - node.lineno + 1)
    return b"".join(lines[first:last]).decode().rstrip() + "\n"


def _check_names(text: str) -> None:
    """Raise CannotAssemble for a name that nothing defines, as of an import under a condition."""
    table = symtable.symtable(text, "<assembled>", "exec")
    defined = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned()}
    defined |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_imported()}
    defined |= {*dir(builtins), "__name__"}
    todo = [table]
    while todo:
        scope = todo.pop()
        todo += scope.get_children()
        for symbol in scope.get_symbols():
            is_free = symbol.is_global() and symbol.is_referenced()
            if is_free and symbol.get_name() not in defined:
                raise CannotAssemble(f"{symbol.get_name()} is not defined ({scope.get_name()})")


def _start(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset
