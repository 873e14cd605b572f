"""The study's tables: Markdown for people and RESULTS.md, CSV for programs."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from cat_lm.io.files import atomic_write, write_text
from eval.common.style import short_count
from eval.common.text_table import markdown_table

WORDS = {
    "unclear": "unclear",
    "lower": "**lower**",
    "higher": "**higher**",
    "one seed": "one seed",
}


def write_tables(summary: dict[str, Any], out: Path) -> None:
    """Writes small_study.md and small_study.csv into `out`."""
    write_text(out / "small_study.md", markdown(summary))
    with atomic_write(out / "small_study.csv") as file:
        columns = ["model", "method", "length", "seeds"]
        values = ("loss", "perplexity", "bits_per_byte")
        columns += [f"{value}_{part}" for value in values for part in ("mean", "sd")]
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for cell in summary["cells"]:
            row = {key: cell[key] for key in ("model", "method", "length")}
            row["seeds"] = cell["loss"]["n"] if cell["loss"] else 0
            for value in values:
                found = cell[value] or {"mean": None, "sd": None}
                row |= {f"{value}_mean": found["mean"], f"{value}_sd": found["sd"]}
            writer.writerow(row)


def markdown(summary: dict[str, Any]) -> str:
    """All of it, ready to be put into a larger document."""
    parts = [_setting(summary), _main_table(summary), _scaled_table(summary), _findings(summary)]
    if summary["missing"]:
        parts.append(f"Not finished: {', '.join(summary['missing'])}.")
    return "\n\n".join(part for part in parts if part) + "\n"


def _setting(summary: dict[str, Any]) -> str:
    models = [model for model in summary["models"] if model["seeds"]]
    sizes = sorted(model["parameters"] for model in models if model["parameters"])
    span = " to ".join(dict.fromkeys(short_count(size) for size in (sizes[:1] + sizes[-1:])))
    precision = ", ".join(sorted({model["precision"] for model in models}))
    # NoPE without convolution may leave no row, a study of it alone none at all.
    scored = ""
    if summary["scored_tokens"]:
        scored = (
            f" Held-out text: {summary['scored_tokens']:,} tokens of "
            f"{summary['documents']} documents, the same ones for every model and length, on which "
            f"a unigram model has loss {summary['unigram_loss']:.3f}."
            if summary["unigram_loss"]
            else f" Held-out text: {summary['scored_tokens']:,} tokens."
        )
    return (
        f"{span} parameters, {short_count(summary['training_tokens'])} training tokens at context "
        f"length {summary['training_length']}, {precision}, seeds "
        f"{', '.join(map(str, summary['seeds']))}; every seed decides the weights and the order of "
        f"the data, which is the same for all models.{scored} Numbers are mean ± standard "
        "deviation over seeds; positions are not scaled."
    )


def _main_table(summary: dict[str, Any]) -> str:
    trained = summary["training_length"]
    lengths = sorted({cell["length"] for cell in summary["cells"]})
    base = next((m["label"] for m in summary["models"] if m["model"] == summary["baseline"]), None)
    head = ["model", "parameters", f"loss at {trained:,}"]
    head += [
        f"ppl at {length:,}" + (" (trained)" if length == trained else "") for length in lengths
    ]
    with_base = any(pair["minus"] == summary["baseline"] for pair in summary["comparisons"])
    head += [f"loss − {base}", "verdict"] if with_base else []
    lines = []
    cells = {(c["model"], c["length"]): c for c in summary["cells"] if c["method"] == "none"}
    for model in summary["models"]:
        name = model["model"]
        if not model["seeds"]:
            continue
        at = cells.get((name, trained))
        line = [model["label"], f"{model['parameters']:,}" if model["parameters"] else "n/a"]
        line.append(_value(at and at["loss"], 3))
        for length in lengths:
            cell = cells.get((name, length))
            line.append(_value(cell and cell["perplexity"], 2))
        if with_base:
            line += _against_base(summary, name, trained)
        lines.append(line)
    return markdown_table(head, lines)


def _against_base(summary: dict[str, Any], model: str, length: int) -> list[str]:
    for pair in summary["comparisons"]:
        place = (pair["model"], pair["minus"], pair["length"])
        if place == (model, summary["baseline"], length):
            interval = ""
            if pair["low"] is not None:
                interval = f" [{pair['low']:+.3f}, {pair['high']:+.3f}]"
            return [f"{pair['mean']:+.3f}{interval}", WORDS[pair["verdict"]]]
    return ["", ""]


def _scaled_table(summary: dict[str, Any]) -> str:
    """Perplexity beyond the training length with each way of scaling positions or logits."""
    trained = summary["training_length"]
    lengths = sorted({c["length"] for c in summary["cells"] if c["length"] > trained})
    scaled = [cell for cell in summary["cells"] if cell["method"] != "none"]
    if not scaled:
        return ""
    labels = {model["model"]: model["label"] for model in summary["models"]}
    cells = {(c["model"], c["method"], c["length"]): c["perplexity"] for c in summary["cells"]}
    head, lines = ["model", "method", *(f"ppl at {length:,}" for length in lengths)], []
    for model, method in dict.fromkeys((cell["model"], cell["method"]) for cell in scaled):
        values = [_value(cells.get((model, method, length)), 2) for length in lengths]
        lines.append([labels[model], method, *values])
    table = markdown_table(head, lines)
    return f"With positions (RoPE) or attention logits scaled to the length:\n\n{table}"


def _findings(summary: dict[str, Any]) -> str:
    """Say in words what the intervals carry at the training length and at the longest."""
    lines = []
    for length in dict.fromkeys(pair["length"] for pair in summary["comparisons"]):
        pairs = [pair for pair in summary["comparisons"] if pair["length"] == length]
        clear = [pair for pair in pairs if pair["verdict"] in ("lower", "higher")]
        said = "; ".join(_said(summary, pair) for pair in clear)
        line = f"- At length {length:,}, {len(clear)} of {len(pairs)} comparisons say something"
        lines.append(f"{line}: {said}." if said else f"{line}.")
    if summary["diverged"]:
        lines.append(f"- Training diverged in {', '.join(summary['diverged'])}.")
    rule = (
        "Verdicts: *lower* and *higher* where the paired interval (in brackets) leaves out zero, "
        "otherwise *unclear*. The intervals are widened so that the chance of any wrong word among "
        "all comparisons is at most 5%."
    )
    return "\n".join([rule, "", *lines])


def _said(summary: dict[str, Any], pair: dict[str, Any]) -> str:
    labels = {model["model"]: model["label"] for model in summary["models"]}
    interval = f"{pair['mean']:+.3f} [{pair['low']:+.3f}, {pair['high']:+.3f}]"
    return f"{labels[pair['model']]} {pair['verdict']} than {labels[pair['minus']]}: {interval}"


def _value(summary: dict[str, Any] | None, places: int) -> str:
    if summary is None:
        return "n/a"
    # A perplexity far from the others needs no decimals.
    places = places if summary["mean"] < 1000 else 0
    text = f"{summary['mean']:,.{places}f}"
    return text if summary["sd"] is None else f"{text} ± {summary['sd']:,.{places}f}"
