"""The report of a study in Markdown, from its record alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.common.html import render
from eval.common.text_table import markdown_table
from eval.lab.contrasts import UNCLEAR
from eval.lab.frame import Line, mean
from eval.lab.places import CONTROL, NEGATIVE

if TYPE_CHECKING:
    from eval.lab.study import Study

_TEMPLATE = Path(__file__).with_name("report.md.jinja")


def report(study: Study, record: dict[str, Any], name: str | None = None) -> str:
    """Return the report of a study's record.

    Args:
        name: of the record's files; None: the study's.
    """
    lines = [line for line in record["lines"] if line["row"] != CONTROL]
    return render(
        _TEMPLATE,
        study=study,
        record=record,
        name=name or study.name,
        tables=[
            {"title": one.title, "text": one.text, "rows": markdown_table(one.header, one.rows)}
            for one in study.tables(record)
        ],
        pictures=list(study.pictures(record)),
        warnings=warnings(record),
        setting=_setting(record),
        controls=_controls(record["controls"]),
        rows=[_row(study, row, of_row) for row, of_row in _by_row(lines).items()],
        rule=_rule(record["contrasts"], study),
        contrasts=[
            {"title": row, "text": _contrasts(found, study.axis)}
            for row, found in _by_row(record["contrasts"]).items()
        ],
    )


def warnings(record: dict[str, Any]) -> list[str]:
    """Return warnings about failed controls and diverged runs, shown before any comparison."""
    found = [
        f"The {control['kind']} control of {control['row']} failed: `{control['line']}` "
        f"({control['what']}) reaches {_number(control['value'])}, and "
        f"{'at least' if control['kind'] == 'positive' else 'at most'} "
        f"{control['bound']:.4f} is wanted. {control['means']}".strip()
        for control in record["controls"]
        if not control["passed"]
    ]
    if record["diverged"]:
        runs = "; ".join(
            f"`{x['line']}` on {', '.join(filter(None, (x['row'], x['column'])))} with seed "
            f"{x['seed']}"
            for x in record["diverged"]
        )
        found.append(f"Diverged, so that there is no number to compare: {runs}.")
    return found


def _setting(record: dict[str, Any]) -> str:
    """Return a paragraph on the scale, on what was not run, and on when and where runs were
    trained.
    """
    said = f"At {record['scale']} scale."
    if record["not_run"]:
        said += f" Not run: {', '.join(f'`{name}`' for name in record['not_run'])}."
    if not (found := record.get("trained")):
        return said
    commits = dict.fromkeys(each[:9] + "+" * each.endswith("+") for each in found["commits"])
    changed = " (+: with changes)" if "+" in "".join(commits) else ""
    when = [found[end][:16].replace("T", " ") for end in ("first", "last") if end in found]
    said += f" Runs ended {'between' if when[1:] else 'before'} {' and '.join(when)} UTC"
    at = f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}{changed}"
    return f"{said}, at {at}; {'; '.join(found['machines'])}."


def _controls(controls: Sequence[dict[str, Any]]) -> str:
    header = ["task", "control", "of", "model", "value", "at least / at most", "passed"]
    rows = [
        [
            *(x["row"], x["kind"], x["what"], f"`{x['line']}`", _number(x["value"])),
            *(f"{x['bound']:.4f}", "yes" if x["passed"] else "**no**"),
        ]
        for x in controls
    ]
    return markdown_table(header, rows, right=(4, 5)) if rows else ""


def _row(study: Study, row: str, lines: Sequence[Line]) -> dict[str, Any]:
    """Return the tables of a row of panels: of the measure, and of the other measurements."""
    measure = study.measure_of(row)
    seeds = max(len(line["runs"]) for line in lines)
    found = f"; runs of at least {study.solved:g}" if study.solved is not None else ""
    title = f"{row}: {measure}, mean (least to largest) of {seeds} seeds{found}"
    tables = [{"title": title, "text": _pivot(lines, study.axis, lambda x: _value(x, study))}]
    for name, what in study.also.items():
        of_name = [line for line in lines if name in line["also"]]
        if of_name:
            text = _pivot(of_name, study.axis, lambda x, name=name: _number(mean(x["also"][name])))
            tables.append({"title": f"{row}: {what}", "text": text})
    return {"tables": tables, "rates": _rates(lines)}


def _value(line: Line, study: Study) -> str:
    values = [v for v in line["runs"].values() if v is not None and math.isfinite(v)]
    if len(values) < len(line["runs"]):
        return f"diverged ({len(line['runs']) - len(values)} of {len(line['runs'])})"
    text = _number(mean(line["runs"]))
    if len(values) > 1:
        text += f" ({_number(min(values))} to {_number(max(values))})"
    if study.solved is not None:
        text += f"; {sum(value >= study.solved for value in values)}"
    return text


def _rates(lines: Sequence[Line]) -> str:
    """Return a paragraph on how learning rates were chosen, and which are at a boundary of the
    grid.
    """
    chosen = [line for line in lines if len(line["tried"]) > 1]
    if not chosen:
        return ""
    edges = dict.fromkeys(
        f"`{line['line']}` {'≤' if line['lr'] == min(map(float, line['tried'])) else '≥'} "
        f"{line['lr']:g}"
        for line in chosen
        if line["on_edge"]
    )
    said = "Learning rates were chosen on another seed, of which nothing is reported."
    if edges:
        said += f" The best lies at the edge of those tried for {'; '.join(edges)}."
    return said


def _rule(contrasts: Sequence[dict[str, Any]], study: Study) -> str:
    if not contrasts:
        return ""
    counts = sorted({x["comparisons"] for x in contrasts})
    over = "seeds and documents" if any(x["document_error"] for x in contrasts) else "seeds"
    made = f"all {counts[-1]} comparisons of {'a task' if study.by_row else 'the report'} together"
    if len(counts) > 1 and not study.by_row:
        made = f"{' or '.join(map(str, counts))} comparisons that are made together"
    return (
        f"Paired by seed; 95% intervals over {over} for {made} (Student's t, Bonferroni). A word "
        "stands only where the interval leaves out 0."
    )


def _contrasts(contrasts: Sequence[dict[str, Any]], axis: str) -> str:
    return _pivot(contrasts, axis, _difference, name="contrast", head="difference of")


def _difference(found: dict[str, Any]) -> str:
    if found["mean"] is None:
        return "n/a"
    if found["low"] is None:
        lost = f" ({found['lost']} of {found['n'] + found['lost']} lost)" if found["lost"] else ""
        return f"{found['mean']:+.3f}{lost}"
    word = "" if found["verdict"] == UNCLEAR else f" **{found['verdict']}**"
    return f"{found['mean']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]{word}"


def _pivot(
    lines: Sequence[dict[str, Any]],
    axis: str,
    shown: Callable[[dict[str, Any]], str],
    *,
    name: str = "line",
    head: str = "model",
) -> str:
    """Return lines as a table by name, with a column for each panel column and position on the
    axis.
    """
    places = list(dict.fromkeys((line["column"], line["x"]) for line in lines))
    columns = list(dict.fromkeys(column for column, _ in places))
    places.sort(key=lambda place: (columns.index(place[0]), place[1] is not None and place[1]))
    several = len({x for _, x in places}) > 1
    heads = [
        ", ".join(filter(None, (column, f"{axis} {x:,}" if several and x is not None else "")))
        for column, x in places
    ]
    cells = {(line[name], line["column"], line["x"]): shown(line) for line in lines}
    rows = [
        [_code(one, name), *(cells.get((one, *place), "–") for place in places)]
        for one in dict.fromkeys(line[name] for line in lines)
    ]
    return markdown_table([head, *(h or "value" for h in heads)], rows)


def _code(text: str, name: str) -> str:
    if name == "line" and text == NEGATIVE:
        return f"`{text}` (mixes nothing)"
    return text if " " in text else f"`{text}`"


def _by_row(found: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for each in found:
        rows.setdefault(each["row"], []).append(each)
    return rows


def _number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "diverged"
    return f"{value:.4f}" if abs(value) < 100 else f"{value:,.0f}"
