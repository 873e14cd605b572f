"""The report's page: one HTML file with its style and drawings in it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure

from cat_lm.config import changed_values
from eval.common.runs import Run, curves, unigram_loss
from eval.common.style import short_count
from eval.report.figures import loss_figure
from eval.report.parts import colour_key, figure_html, note, number, run_name
from eval.report.sections import (
    filters_section,
    lengths_section,
    missing_export,
    samples_section,
    table2_section,
)

# By which a page is known as one of ours.
GENERATOR = "cat_lm eval.report"


def page(
    runs: Sequence[Run],
    summary: Sequence[dict[str, Any]],
    rows: Sequence[dict[str, Any]],
    title: str | None,
    made: dict[str, Any],
) -> str:
    """The whole page.

    Args:
        summary: `final_numbers` of each run.
        rows: of the length sweeps.
        made: this report's provenance.
    """
    title = title or ("Training report: " + ", ".join(run.label for run in runs))
    sections = [
        _results(runs, summary),
        _learning(runs),
        table2_section(runs),
        lengths_section(runs, rows),
        filters_section(runs),
        samples_section(runs),
        _configuration(runs),
        _provenance(runs, made),
    ]
    lede = f'<p class="lede">{_lede(runs, summary)}</p>'
    return whole_page(title, "".join(sections), lede)


def whole_page(title: str, content: str, lede: str = "") -> str:
    """A page with the report's style in it: `content` and `lede` are HTML, `title` is text."""
    style = (Path(__file__).parent / "templates" / "report.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="{GENERATOR}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
<header>
<h1>{escape(title)}</h1>
{lede}
</header>
{content}
</main>
</body>
</html>
"""


def _lede(runs: Sequence[Run], summary: Sequence[dict[str, Any]]) -> str:
    what = "One model" if len(runs) == 1 else f"{len(runs)} models"
    sizes = sorted({row["parameters"] for row in summary if row["parameters"]})
    if sizes:
        short = list(dict.fromkeys(short_count(size) for size in sizes))
        what += f" of {' to '.join(dict.fromkeys([short[0], short[-1]]))} parameters"
    budgets = sorted({run.tokens for run in runs})
    each = "" if len(runs) == 1 else ", each"
    amount = " to ".join(dict.fromkeys(short_count(x) for x in (budgets[0], budgets[-1])))
    kinds = {m["source"]["kind"] for run in runs for m in run.manifests.values()}
    source = f" of {escape(', '.join(sorted(kinds)))}" if kinds else ""
    lengths = ", ".join(f"{n:,}" for n in sorted({run.config.data.context_length for run in runs}))
    text = f"{what}{each} trained on {amount} tokens{source} at context length {lengths}."
    scored = [row for row in summary if row["val_loss"] is not None]
    if not scored:
        return text + " No validation was made."
    best = min(scored, key=lambda row: row["val_loss"])
    subject = "Held-out loss" if len(runs) == 1 else f"Lowest held-out loss: {escape(best['run'])},"
    text += (
        f" {subject} {best['val_loss']:.3f} nats per token "
        f"(perplexity {number(best['val_perplexity'])}, "
        f"{best['val_bits_per_byte']:.3f} bits per byte)"
    )
    reference = unigram_loss(runs)
    return text + (f"; a unigram model's is {reference:.2f}." if reference else ".")


def _results(runs: Sequence[Run], summary: Sequence[dict[str, Any]]) -> str:
    columns: list[tuple[str, str, Callable[[Any], str], Callable | None]] = [
        ("val_loss", "held-out loss<small>nats per token</small>", "{:.4f}".format, min),
        ("val_perplexity", "perplexity<small>per token</small>", number, min),
        ("val_bits_per_byte", "bits<small>per byte</small>", "{:.4f}".format, min),
        ("parameters", "parameters", "{:,}".format, None),
        ("tokens", "tokens", short_count, None),
        ("tokens_per_second", "training<small>tokens/s</small>", "{:,.0f}".format, None),
    ]
    head = "".join(f"<th>{name}</th>" for _, name, _, _ in columns)
    lines = []
    for index, (run, row) in enumerate(zip(runs, summary, strict=True)):
        cells = []
        for key, _, show, better in columns:
            value = row[key]
            known = [r[key] for r in summary if r[key] is not None]
            best = better and len(runs) > 1 and value is not None and value == better(known)
            text = "n/a" if value is None else show(value)
            cells.append(f'<td class="best">{text}</td>' if best else f"<td>{text}</td>")
        lines.append(f"<tr><th>{colour_key(index)}{run_name(run)}</th>{''.join(cells)}</tr>")
    reference = unigram_loss(runs)
    if reference is not None:
        lines.append(
            '<tr class="reference"><th>unigram model<small>of the training split</small></th>'
            f"<td>{reference:.4f}</td><td>{number(math.exp(reference))}</td>"
            "<td></td><td></td><td></td><td></td></tr>"
        )
    skipped = [f"{run.label}: {run.skipped}" for run in runs if run.skipped]
    notes = "".join(
        [
            note("Best values are bold. One seed each: small differences are not findings.")
            if len(runs) > 1
            else "",
            note(f"Steps skipped because of a non-finite loss: {escape(', '.join(skipped))}.")
            if skipped
            else "",
            _data_note(runs),
            missing_export(runs),
        ]
    )
    return (
        f'<section><h2>Results</h2><div class="scroll"><table><thead><tr><th>run</th>{head}</tr>'
        f"</thead><tbody>{''.join(lines)}</tbody></table></div>{notes}</section>\n"
    )


def _learning(runs: Sequence[Run]) -> str:
    reference = unigram_loss(runs)

    def draw(size: tuple[float, float]) -> Figure:
        return loss_figure(curves(runs), reference, size)

    caption = "Points: loss on the held-out split. Thin lines: training loss, a running mean."
    if reference is not None:
        caption += " Dashed: what a unigram model reaches; the first steps may be cut off."
    return f"<section><h2>Learning</h2>{figure_html(draw, 'loss', caption)}</section>\n"


def _configuration(runs: Sequence[Run]) -> str:
    dumps = [run.config.model_dump(mode="json") for run in runs]
    names = [name for dump in dumps[1:] for name in changed_values(dumps[0], dump)]
    names = [name for name in dict.fromkeys(names) if name != "train.output_dir"]
    table = ""
    if names:
        head = "".join(f"<th>{colour_key(i)}{escape(run.label)}</th>" for i, run in enumerate(runs))
        lines = "".join(
            f"<tr><th><code>{name}</code></th>"
            + "".join(f"<td>{escape(str(_lookup(dump, name)))}</td>" for dump in dumps)
            + "</tr>"
            for name in names
        )
        table = (
            f'<div class="scroll"><table><thead><tr><th>what differs</th>{head}</tr></thead>'
            f"<tbody>{lines}</tbody></table></div>"
        )
    details = "".join(
        f"<details><summary>{escape(run.label)}: the whole configuration</summary>"
        f"<pre>{escape(yaml.safe_dump(dump, sort_keys=False))}</pre></details>"
        for run, dump in zip(runs, dumps, strict=True)
    )
    return f"<section><h2>Configuration</h2>{table}{details}</section>\n"


def _provenance(runs: Sequence[Run], made: dict[str, Any]) -> str:
    commands = []
    for run in runs:
        folder = shlex.quote(str(run.folder))
        commands.append(f"python train.py {folder}/config.yaml train.output_dir=NEW")
        if run.export:
            commands.append(f"python -m cat_lm.export {folder} {folder}/model")
    evaluations = [run.sweep.get("command") for run in runs]
    commands += dict.fromkeys([*filter(None, evaluations), made["command"]])
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    facts = {"made": made["date"], "machine": made["machine"], "versions": versions}
    manifests = {name: m for run in runs for name, m in run.manifests.items()}
    for name, manifest in manifests.items():
        train = manifest["splits"]["train"]
        facts[f"data {name}"] = (
            f"{train['documents']:,} documents, {train['tokens']:,} training tokens, "
            f"fingerprint {manifest['fingerprint'][:16]}"
        )
    rows = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items())
    return (
        "<section><h2>How this was made</h2>"
        f'<pre class="commands">{escape(chr(10).join(commands))}</pre>'
        f'<dl class="facts">{rows}</dl>'
        '<p class="meta">The numbers are also in <a href="summary.json">summary.json</a> and '
        '<a href="summary.csv">summary.csv</a>, the pictures beside this page as PNG and SVG.'
        "</p></section>\n"
    )


def _data_note(runs: Sequence[Run]) -> str:
    if len({run.data for run in runs}) == 1:
        return ""
    return note("The runs were trained on different data; compare them with care.")


def _lookup(values: dict[str, Any], dotted: str) -> Any:
    for part in dotted.split("."):
        values = values.get(part, {}) if isinstance(values, dict) else {}
    return values
