"""The sections of the report's page that show what was measured after training."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape
from typing import Any

from matplotlib.figure import Figure

from eval.common.filters import own_taps
from eval.common.runs import Run
from eval.common.style import run_colour
from eval.length_sweep.figures import has_error_bars, length_figure, position_figure
from eval.report import table2
from eval.report.filters import filters_figure, views
from eval.report.parts import colour_key, figure_html, note, number

OUTDATED = "Not shown, as measured on other weights than the present export's; to measure anew"


def missing_export(runs: Sequence[Run]) -> str:
    """A note on runs whose weights are not exported yet; empty where there are none."""
    return _todo(
        "Not exported yet, so without evaluation and filters",
        [f"python -m cat_lm.export {_folder(r)} {_folder(r)}/model" for r in runs if not r.export],
    )


def table2_section(runs: Sequence[Run]) -> str:
    """The paper's Table 2 with the runs above its rows."""
    ours, theirs = table2.own_rows(runs), table2.paper_rows()
    keys = [colour_key(index) for index in range(len(runs))]
    missing = [
        _zero_shot_command(run)
        for run, row in zip(runs, ours, strict=True)
        if any(row.values[column] is None for column in table2.COLUMNS)
        and "zero_shot" not in run.outdated
    ]
    outdated = [_zero_shot_command(run) for run in runs if "zero_shot" in run.outdated]
    parts = [table2.html(ours, theirs, keys) if _any(ours) else ""]
    if parts[0]:
        parts.append(note(escape(table2.NOTE)))
    if limits := table2.limit_note(ours):
        parts.append(note(f"<strong>{escape(limits)}</strong>"))
    parts.append(_todo(OUTDATED, outdated))
    parts.append(_todo("Not measured, or not all of it", missing))
    heading = "Zero-shot tasks: Table 2 of the paper"
    return f"<section><h2>{heading}</h2>{''.join(parts)}</section>\n"


def _zero_shot_command(run: Run) -> str:
    return f"python -m eval.zero_shot {_folder(run)} --tasks table2"


def _any(rows: Sequence[table2.Row]) -> bool:
    return any(value is not None for row in rows for value in row.values.values())


def lengths_section(runs: Sequence[Run], rows: Sequence[dict[str, Any]]) -> str:
    """Figure 1 of the paper with these runs, its numbers, and loss by position."""
    heading = "<section><h2>Perplexity against context length</h2>"
    outdated = [run for run in runs if "sweep" in run.outdated]
    absent = [run for run in runs if not run.sweep and run not in outdated]
    todo = _strangers_note(runs) + _todo(OUTDATED, [_sweep_command(run) for run in outdated])
    todo += _todo("Not measured", [_sweep_command(run) for run in absent])
    if not rows:
        return f"{heading}{todo}</section>\n"

    def draw(size: tuple[float, float]) -> Figure:
        return length_figure(rows, size, order=[run.label for run in runs])

    parts = [heading, figure_html(draw, "lengths", _length_caption(runs, rows))]
    # One line a run: the methods would hide each other.
    plain = [row for row in rows if row["method"] == "none" and row.get("positions")]
    if plain:
        caption = (
            "Loss by how many tokens of the window were seen before, in windows of "
            f"{max(row['length'] for row in plain):,}; positions not scaled."
        )
        parts.append(figure_html(lambda size: position_figure(plain, size), "positions", caption))
    parts += [_length_table(runs, rows), todo]
    return "".join([*parts, "</section>\n"])


def _strangers_note(runs: Sequence[Run]) -> str:
    """What else lies in the runs' sweeps: their rows are of other models, so not of the runs."""
    parts = [
        f"{run.label} ({', '.join(run.strangers)})" for run in runs if run.strangers and run.sweep
    ]
    text = f"Left out: rows of other weights in the sweeps of {', '.join(parts)}."
    return note(escape(text)) if parts else ""


def _length_caption(runs: Sequence[Run], rows: Sequence[dict[str, Any]]) -> str:
    row = rows[0]
    sweep = next(run.sweep for run in runs if run.sweep)
    windows = sweep.get("protocol", {}).get("windows", "non-overlapping")
    caption = (
        f"{row['tokens']:,} tokens of {escape(sweep.get('text', 'the held-out text'))}, the same "
        f"ones at every length, each scored once (windows: {escape(windows)}). Dashed: the length "
        "of training. "
    )
    if has_error_bars(rows):
        caption += f"Bars: one standard error over {row['groups']:,} {row['group_kind']}."
    else:
        caption += f"Too few {row['group_kind']} ({row['groups']}) for error bars."
    if len({row["tokens_sha256"] for row in rows}) > 1:
        caption += " <strong>The runs were scored on different tokens.</strong>"
    return caption


def _sweep_command(run: Run) -> str:
    trained = run.config.data.context_length
    lengths = ",".join(str(max(1, int(trained * factor))) for factor in (0.5, 1, 2, 4, 8))
    data = shlex.quote(run.config.data.folders[0])
    return (
        f"python -m eval.length_sweep {_folder(run)} --data {data} --lengths {lengths} "
        f"--methods all --out {_folder(run)}/eval"
    )


def _folder(run: Run) -> str:
    return shlex.quote(str(run.folder))


def _todo(text: str, commands: Sequence[str]) -> str:
    """A note that names the commands which make what is missing; empty without any."""
    if not commands:
        return ""
    lines = escape("\n".join(commands))
    return f'<div class="todo"><p class="note">{text}:</p><pre class="commands">{lines}</pre></div>'


def _length_table(runs: Sequence[Run], rows: Sequence[dict[str, Any]]) -> str:
    lengths = sorted({row["length"] for row in rows})
    cells = {(row["label"], row["method"], row["length"]): row for row in rows}
    head = "".join(f"<th>{length:,}</th>" for length in lengths)
    lines = []
    for index, run in enumerate(runs):
        methods = list(dict.fromkeys(r["method"] for r in rows if r["label"] == run.label))
        for method in methods:
            found = [cells.get((run.label, method, length)) for length in lengths]
            values = "".join(f"<td>{_length_cell(row, method)}</td>" for row in found)
            name = f'<span class="method">{escape(method)}</span>'
            if method == "none":
                name = colour_key(index) + escape(run.label)
            more = " more" if method != methods[-1] else ""
            kind = "plain" if method == "none" else "scaled"
            lines.append(f'<tr class="{kind}{more}"><th>{name}</th>{values}</tr>')
    return (
        f'<div class="scroll"><table><thead><tr><th>perplexity per token'
        f"<small>bits per byte below</small></th>{head}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _length_cell(row: dict[str, Any] | None, method: str) -> str:
    if row is None:
        return ""
    bits = f"<small>{number(row['bits_per_byte'])}</small>" if method == "none" else ""
    return number(row["perplexity"]) + bits


def samples_section(runs: Sequence[Run]) -> str:
    shown = [(index, run) for index, run in enumerate(runs) if run.samples]
    outdated = [f"python -m eval.samples {_folder(r)}" for r in runs if "samples" in r.outdated]
    todo = _todo(OUTDATED, outdated)
    heading = "<section><h2>Continuations of held-out documents</h2>"
    if not shown:
        return f"{heading}{todo}</section>\n" if todo else ""
    options = shown[0][1].samples
    parts = [
        heading,
        f'<p class="meta">Grey: the beginning of a document that was not trained on. Below it, '
        f"what each model goes on to write: {options['max_new_tokens']} tokens, temperature "
        f"{options['temperature']}, top-p {options['top_p']}, seed {options['seed']}; nothing "
        "was chosen by hand.</p>",
    ]
    prompts = dict.fromkeys(s["prompt"] for _, run in shown for s in run.samples["samples"])
    for position, prompt in enumerate(prompts, 1):
        cards, reference = [], ""
        for index, run in shown:
            for sample in run.samples["samples"]:
                if sample["prompt"] == prompt:
                    reference = sample["reference"]
                    cards.append(_sample_card(index, run.label, sample["continuation"]))
        parts.append(
            f'<h3>Document {position}</h3><pre class="prompt">{escape(prompt)}</pre>'
            f'<div class="samples">{"".join(cards)}</div>'
            f"<details><summary>How the document goes on</summary><pre>{escape(reference)}</pre>"
            "</details>"
        )
    return "".join([*parts, todo, "</section>\n"])


def _sample_card(index: int, label: str, text: str) -> str:
    colour = run_colour(index)
    return (
        f'<div class="sample" style="border-top-color: {colour}"><h4>{escape(label)}</h4>'
        f"<pre>{escape(text)}</pre></div>"
    )


def filters_section(runs: Sequence[Run]) -> str:
    """The portraits of the learned filters."""
    parts = []
    for run in runs:
        if not run.filters:
            continue

        def draw(size: tuple[float, float], run: Run = run) -> Figure:
            return filters_figure(run.filters, size)

        parts.append(
            f"<h3>{escape(run.label)}</h3>"
            f"{figure_html(draw, f'filters-{run.label}', _filters_caption(run))}"
        )
    if not parts:
        return ""
    return f"<section><h2>Learned filters</h2>{''.join(parts)}</section>\n"


def _filters_caption(run: Run) -> str:
    filters = run.filters
    first = {stream: float(taps[..., 0].mean()) for stream, taps in own_taps(filters).items()}
    means = ", ".join(f"{value:.2f} ({stream})" for stream, value in first.items())
    shown = views(filters)
    caption = (
        "Each row is a head, layers from top to bottom; lag 0 is the token itself. The colours end "
        f"at the largest tap behind lag 0 ({shown[0].limit:.3f}); lag 0 is mostly beyond them, on "
        f"average {means}."
    )
    if filters.kind.mixes_heads:
        caption += (
            " Below, how much each head (row) takes from each head (column): the norm of the taps "
            f"over all lags; the colours end at the largest between different heads "
            f"({shown[1].limit:.3f})."
        )
    if "D" in filters.kind.filter_axes:
        caption += (
            " Every channel has a filter of its own: above their mean in a head, below how far "
            "the channels differ."
        )
    return caption
