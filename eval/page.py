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
from eval.figures import (
    NARROW,
    RUN_COLOURS,
    WIDE,
    filter_scale,
    filters_figure,
    has_error_bars,
    length_figure,
    loss_figure,
    page_svg,
    short_count,
)
from eval.runs import Run, curves, unigram_loss


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
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    sections = [
        _results(runs, summary),
        _learning(runs),
        _lengths(runs, rows),
        _samples(runs),
        _filters(runs),
        _configuration(runs),
        _provenance(runs, made),
    ]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
<header>
<h1>{escape(title)}</h1>
<p class="lede">{_lede(runs, summary)}</p>
</header>
{"".join(sections)}
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
    kinds = {run.manifest["source"]["kind"] for run in runs if run.manifest.get("source")}
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
        f"(perplexity {_number(best['val_perplexity'])}, "
        f"{best['val_bits_per_byte']:.3f} bits per byte)"
    )
    reference = unigram_loss(runs)
    return text + (f"; a unigram model's is {reference:.2f}." if reference else ".")


def _results(runs: Sequence[Run], summary: Sequence[dict[str, Any]]) -> str:
    columns: list[tuple[str, str, Callable[[Any], str], Callable | None]] = [
        ("val_loss", "held-out loss<small>nats per token</small>", "{:.4f}".format, min),
        ("val_perplexity", "perplexity<small>per token</small>", _number, min),
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
        lines.append(f"<tr><th>{_key(index)}{_name(run)}</th>{''.join(cells)}</tr>")
    reference = unigram_loss(runs)
    if reference is not None:
        lines.append(
            '<tr class="reference"><th>unigram model<small>of the training split</small></th>'
            f"<td>{reference:.4f}</td><td>{_number(math.exp(reference))}</td>"
            "<td></td><td></td><td></td><td></td></tr>"
        )
    skipped = [f"{run.label}: {run.skipped}" for run in runs if run.skipped]
    notes = "".join(
        [
            _note("Best values are bold. One seed each: small differences are not findings.")
            if len(runs) > 1
            else "",
            _note(f"Steps skipped because of a non-finite loss: {escape(', '.join(skipped))}.")
            if skipped
            else "",
            _data_note(runs),
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
    return f"<section><h2>Learning</h2>{_figure(draw, 'loss', caption)}</section>\n"


def _lengths(runs: Sequence[Run], rows: Sequence[dict[str, Any]]) -> str:
    missing = [run for run in runs if not run.sweep]
    heading = "<section><h2>Perplexity against context length</h2>"
    hint = ""
    if missing:
        names = " ".join(shlex.quote(str(run.folder)) for run in missing)
        hint = _note(f"Not measured yet: <code>python -m eval.quickstart {escape(names)}</code>")
    if not rows:
        return f"{heading}{hint}</section>\n"

    def draw(size: tuple[float, float]) -> Figure:
        return length_figure(rows, size, order=[run.label for run in runs])

    row = rows[0]
    sweep = next(run.sweep for run in runs if run.sweep)
    caption = (
        f"{row['tokens']:,} tokens of {escape(sweep['text'])}, the same ones at every length, "
        "each scored once in windows that do not overlap. Dashed: the length of training. "
    )
    if has_error_bars(rows):
        caption += f"Bars: one standard error over {row['groups']:,} {row['group_kind']}."
    else:
        caption += f"Too few {row['group_kind']} ({row['groups']}) for error bars."
    if len({row["tokens_sha256"] for row in rows}) > 1:
        caption += " <strong>The runs were scored on different tokens.</strong>"
    table = _length_table(runs, rows)
    return f"{heading}{hint}{_figure(draw, 'lengths', caption)}{table}</section>\n"


def _length_table(runs: Sequence[Run], rows: Sequence[dict[str, Any]]) -> str:
    lengths = sorted({row["length"] for row in rows})
    cells = {(row["label"], row["method"], row["length"]): row for row in rows}
    head = "".join(f"<th>{length:,}</th>" for length in lengths)
    lines = []
    for index, run in enumerate(runs):
        for method in dict.fromkeys(r["method"] for r in rows if r["label"] == run.label):
            found = [cells.get((run.label, method, length)) for length in lengths]
            values = "".join(
                f"<td>{_number(row['perplexity'])}<small>{_number(row['bits_per_byte'])}</small>"
                "</td>"
                if row
                else "<td></td>"
                for row in found
            )
            name = run.label if method == "none" else f"{run.label}, {method}"
            lines.append(f"<tr><th>{_key(index)}{escape(name)}</th>{values}</tr>")
    return (
        f'<div class="scroll"><table><thead><tr><th>perplexity per token'
        f"<small>bits per byte below</small></th>{head}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _samples(runs: Sequence[Run]) -> str:
    shown = [(index, run) for index, run in enumerate(runs) if run.samples]
    if not shown:
        return ""
    options = shown[0][1].samples
    parts = [
        "<section><h2>Continuations of held-out documents</h2>",
        f'<p class="meta">Grey: the beginning of a document that was not trained on. Below it, '
        f"what each model goes on to write: {options['max_new_tokens']} tokens, temperature "
        f"{options['temperature']}, top-p {options['top_p']}, seed {options['seed']}; nothing "
        "was chosen by hand.</p>",
    ]
    prompts = dict.fromkeys(s["prompt"] for _, run in shown for s in run.samples["samples"])
    for number, prompt in enumerate(prompts, 1):
        cards, reference = [], ""
        for index, run in shown:
            for sample in run.samples["samples"]:
                if sample["prompt"] == prompt:
                    reference = sample["reference"]
                    cards.append(_sample_card(index, run.label, sample["continuation"]))
        parts.append(
            f'<h3>Document {number}</h3><pre class="prompt">{escape(prompt)}</pre>'
            f'<div class="samples">{"".join(cards)}</div>'
            f"<details><summary>How the document goes on</summary><pre>{escape(reference)}</pre>"
            "</details>"
        )
    return "".join([*parts, "</section>\n"])


def _sample_card(index: int, label: str, text: str) -> str:
    colour = f"var(--run-{index % len(RUN_COLOURS)})"
    return (
        f'<div class="sample" style="border-top-color: {colour}"><h4>{escape(label)}</h4>'
        f"<pre>{escape(text)}</pre></div>"
    )


def _filters(runs: Sequence[Run]) -> str:
    parts = []
    for run in runs:
        if not run.filters:
            continue
        first = [float(taps[..., 0].mean()) for taps in run.filters.values()]
        caption = (
            "Weight of the token itself (lag 0) and of the tokens before it; each row is a head. "
            f"The colours end at the largest tap behind lag 0 ({filter_scale(run.filters):.3f}); "
            "lag 0 is mostly beyond them, on average "
            + ", ".join(f"{x:.2f} ({s})" for s, x in zip(run.filters, first, strict=True))
            + "."
        )

        def draw(size: tuple[float, float], run: Run = run) -> Figure:
            return filters_figure(run.filters, size)

        parts.append(
            f"<h3>{escape(run.label)}</h3>{_figure(draw, f'filters-{run.label}', caption)}"
        )
    if not parts:
        return ""
    return f"<section><h2>Learned filters</h2>{''.join(parts)}</section>\n"


def _configuration(runs: Sequence[Run]) -> str:
    dumps = [run.config.model_dump(mode="json") for run in runs]
    names = [name for dump in dumps[1:] for name in changed_values(dumps[0], dump)]
    names = [name for name in dict.fromkeys(names) if name != "train.output_dir"]
    table = ""
    if names:
        head = "".join(f"<th>{_key(i)}{escape(run.label)}</th>" for i, run in enumerate(runs))
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
    for run in runs:
        if run.manifest:
            train = run.manifest["splits"]["train"]
            facts["data"] = (
                f"{run.config.data.path}: {train['documents']:,} documents, {train['tokens']:,} "
                f"training tokens, fingerprint {run.manifest['fingerprint'][:16]}"
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


def _figure(draw: Callable[[tuple[float, float]], Figure], name: str, caption: str) -> str:
    """Two drawings of one figure; the style shows the one that suits the screen's width."""
    wide, narrow = (
        page_svg(draw(size), f"{name}-{kind}", name) for kind, size in (("w", WIDE), ("n", NARROW))
    )
    return (
        f'<figure><div class="wide">{wide}</div><div class="narrow">{narrow}</div>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _name(run: Run) -> str:
    model = run.config.model
    positions = "RoPE" if model.position_embedding == "rope" else "no positions"
    kind = "no convolution"
    if model.conv_type != "none":
        kind = f"{model.conv_type} convolution of {', '.join(model.conv_streams)}"
    return f"{escape(run.label)}<small>{kind}; {positions}</small>"


def _data_note(runs: Sequence[Run]) -> str:
    if len({run.manifest.get("fingerprint") for run in runs}) == 1:
        return ""
    return _note("The runs were trained on different data; compare them with care.")


def _key(index: int) -> str:
    return f'<span class="key" style="background: var(--run-{index % len(RUN_COLOURS)})"></span>'


def _note(text: str) -> str:
    return f'<p class="note">{text}</p>'


def _lookup(values: dict[str, Any], dotted: str) -> Any:
    for part in dotted.split("."):
        values = values.get(part, {}) if isinstance(values, dict) else {}
    return values


def _number(value: float | None) -> str:
    """Four digits or so: 1.234, 12.34, 123.4, 1,234."""
    if value is None:
        return "n/a"
    places = next((n for limit, n in ((10, 3), (100, 2), (1000, 1)) if value < limit), 0)
    return f"{value:,.{places}f}"
