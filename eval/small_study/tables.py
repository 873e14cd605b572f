"""The study's tables: Markdown for people and RESULTS.md, CSV for programs."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cat_lm.core.files import atomic_write, write_text
from eval.common.style import short_count
from eval.common.text_table import markdown_table

WORDS = {
    "unclear": "unclear",
    "lower": "**lower**",
    "higher": "**higher**",
    "one seed": "one seed",
}
# Key of `attention_statistics` -> head of its column.
SHARPNESS = {"entropy": "entropy / ln t", "largest_logit": "largest logit"}
EDGES = {"": "", "<=": "≤ ", ">=": "≥ "}


def write_tables(summary: dict[str, Any], out: Path) -> None:
    """Writes small_study.md and small_study.csv into `out`."""
    write_text(out / "small_study.md", markdown(summary))
    with atomic_write(out / "small_study.csv") as file:
        columns = ["text", "model", "method", "length", "seeds"]
        values = ("loss", "perplexity", "bits_per_byte")
        columns += [f"{value}_{part}" for value in values for part in ("mean", "sd")]
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for text in (summary, *summary["held_out"].values()):
            writer.writerows(_csv_row(text["data"], cell, values) for cell in text["cells"])


def _csv_row(text: str, cell: dict[str, Any], values: Sequence[str]) -> dict[str, Any]:
    row = {key: cell[key] for key in ("model", "method", "length")}
    row |= {"text": text, "seeds": cell["loss"]["n"] if cell["loss"] else 0}
    for value in values:
        found = cell[value] or {"mean": None, "sd": None}
        row |= {f"{value}_mean": found["mean"], f"{value}_sd": found["sd"]}
    return row


def markdown(summary: dict[str, Any]) -> str:
    """All of it, ready to be put into a larger document."""
    parts = [setting(summary)]
    for name, text in [("", summary), *summary["held_out"].items()]:
        if name:
            parts.append(f"Text of {text['data']} ({_scored(text)}):")
        parts += [_main_table(summary, text), _comparison_table(summary, text)]
        parts.append(_scaled_table(summary, text))
    parts += [_attention_table(summary), _rates_table(summary), rule(summary)]
    if summary["missing"]:
        parts.append(f"Not finished: {', '.join(summary['missing'])}.")
    return "\n\n".join(part for part in parts if part) + "\n"


def _scored(text: dict[str, Any]) -> str:
    """Return what was scored of a text."""
    documents = f"{text['documents']} documents, the same ones for every model and length"
    return f"{text['scored_tokens']:,} tokens of {documents}"


def setting(summary: dict[str, Any]) -> str:
    """Return what was trained and scored."""
    models = [model for model in summary["models"] if model["seeds"]]
    sizes = sorted(model["parameters"] for model in models if model["parameters"])
    span = " to ".join(dict.fromkeys(short_count(size) for size in (sizes[:1] + sizes[-1:])))
    precision = ", ".join(sorted({model["precision"] for model in models}))
    # NoPE without convolution may leave no row, a study of it alone none at all.
    scored = f" Held-out text: {_scored(summary)}." if summary["scored_tokens"] else ""
    if scored and summary["unigram_loss"]:
        scored += f" A unigram model has loss {summary['unigram_loss']:.3f} on all held-out text."
    return (
        f"{span} parameters, {short_count(summary['training_tokens'])} training tokens at context "
        f"length {summary['training_length']}, {precision}, seeds "
        f"{', '.join(map(str, summary['seeds']))}; every seed decides the weights and the order of "
        f"the data, which is the same for all models.{scored} Numbers are mean ± standard "
        f"deviation over seeds; positions are not scaled.{_mixed(summary)}"
    )


def _mixed(summary: dict[str, Any]) -> str:
    """Return by what code and where runs were trained, which this page may not be of."""
    found = summary["trained_with"]
    commits = [
        commit[:12] + "+" * commit.endswith("+") if commit else "unknown"
        for commit in found["commit"]
    ]
    said = ""
    if len(commits) > 1:
        said += f" Runs were trained by code of different commits: {', '.join(commits)}."
    elif commits != ["unknown"]:
        said += f" Runs were trained by code of commit {commits[0]}."
    if others := [folder for folder in found["reused"] if folder]:
        said += f" Trainings that are the same there were taken over from {', '.join(others)}."
    if len(threads := found["threads"]) > 1:
        said += f" Runs had different numbers of threads ({', '.join(map(str, threads))}), so that"
        said += " tokens a second do not compare."
    if len(machines := found["machine"]) > 1:
        said += f" Runs were trained on different machines ({'; '.join(machines)}), so that tokens"
        said += " a second do not compare."
    return said


def _main_table(summary: dict[str, Any], text: dict[str, Any]) -> str:
    trained = summary["training_length"]
    lengths = sorted({cell["length"] for cell in text["cells"]})
    tuned = any(model["tuned"] for model in summary["models"])
    head = ["model", "parameters", *(["rate"] if tuned else []), f"loss at {trained:,}"]
    head += [
        f"ppl at {length:,}" + (" (trained)" if length == trained else "") for length in lengths
    ]
    lines = []
    cells = {(c["model"], c["length"]): c for c in text["cells"] if c["method"] == "none"}
    for model in summary["models"]:
        name = model["model"]
        if not model["seeds"]:
            continue
        at = cells.get((name, trained))
        line = [model["label"], f"{model['parameters']:,}" if model["parameters"] else "n/a"]
        if tuned:
            line.append(f"{EDGES[model['tuned']['edge']]}{model['rate']:g}")
        line.append(value(at and at["loss"], 3))
        for length in lengths:
            cell = cells.get((name, length))
            line.append(value(cell and cell["perplexity"], 2))
        lines.append(line)
    return markdown_table(head, lines)


def _comparison_table(summary: dict[str, Any], text: dict[str, Any]) -> str:
    """The question's differences in loss, with corrected intervals."""
    if not text["comparisons"]:
        return ""
    return markdown_table(*comparison_lines(summary, comparison_columns(summary, text)))


def comparison_columns(
    summary: dict[str, Any], text: dict[str, Any], words: str = ""
) -> dict[str, list[dict[str, Any]]]:
    """Gather a text's differences by length and method: head of a column -> differences.

    Args:
        words: before the length, such as what the differences are of.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for pair in text["comparisons"]:
        head = f"{words} at {pair['length']:,}".strip()
        if pair["length"] > summary["training_length"]:
            read = {"none": "positions as trained", "yarn": "RoPE by YaRN"}
            head += f", {read[pair['method']]}"
        found.setdefault(head, []).append(pair)
    return found


def comparison_lines(
    summary: dict[str, Any], found: Mapping[str, Sequence[dict[str, Any]]]
) -> tuple[list[str], list[list[str]]]:
    """The head and the lines of a table of differences.

    Args:
        found: head of a column -> its differences.
    """
    labels = {model["model"]: model["label"] for model in summary["models"]}
    asked = len(summary["seeds"])
    columns = [{(p["model"], p["minus"]): p for p in pairs} for pairs in found.values()]
    head = ["loss of", "minus", *(part for name in found for part in (name, ""))]
    lines = [
        [
            _label(labels, a),
            _label(labels, b) if a != b else f"itself at {summary['training_length']:,}",
            *(part for column in columns for part in _said(column.get((a, b)), asked)),
        ]
        for a, b in dict.fromkeys(pair for column in columns for pair in column)
    ]
    return head, lines


def _label(labels: dict[str, str], name: str) -> str:
    """A model's label, or both of a difference of two."""
    return " − ".join(labels[model] for model in name.split(" − "))


def _attention_table(summary: dict[str, Any]) -> str:
    """Return how sharply the models attend, where the question asks."""
    if not summary.get("attention"):
        return ""
    labels = {model["model"]: model["label"] for model in summary["models"]}
    lines = [
        [labels[one["model"]], value(one["entropy"], 3), value(one["largest_logit"], 1)]
        for one in summary["attention"]
    ]
    table = markdown_table(["model", *SHARPNESS.values()], lines)
    said = (
        "Attention at the training length, mean over queries, heads and layers (1: all earlier "
        f"tokens are read alike), and the largest logit of any:\n\n{table}"
    )
    return said + _attention_differences(summary, labels)


def _attention_differences(summary: dict[str, Any], labels: dict[str, str]) -> str:
    found = {(p["model"], p["minus"], p["of"]): p for p in summary["attention_comparisons"]}
    if not found:
        return ""
    head = ["of", "minus", *(part for name in SHARPNESS.values() for part in (name, ""))]
    lines = [
        [labels[a], labels[b]]
        + [
            part
            for key in SHARPNESS
            for part in _said(found.get((a, b, key)), len(summary["seeds"]))
        ]
        for a, b in dict.fromkeys((a, b) for a, b, _ in found)
    ]
    made = next(iter(found.values()))["comparisons"]
    note = f"Over seeds alone, corrected for the {made} of this table:"
    return f"\n\n{note}\n\n{markdown_table(head, lines)}"


def tuned_lines(summary: dict[str, Any]) -> tuple[list[str], list[list[str]]] | None:
    """The validation loss of every model at every rate tried, the chosen one's in bold.

    Returns the head and the lines of a table; None where no rates were tried.
    """
    tuned = [model for model in summary["models"] if model["tuned"]]
    rates = sorted({rate for model in tuned for rate in model["tuned"]["losses"]}, key=float)
    if not rates:
        return None
    lines = []
    for model in tuned:
        losses = model["tuned"]["losses"]
        line = [
            "" if rate not in losses else "diverged" if losses[rate] is None else f"{loss:.3f}"
            for rate in rates
            for loss in (losses.get(rate),)
        ]
        chosen = rates.index(f"{model['tuned']['rate']:g}")
        line[chosen] = f"**{line[chosen]}**"
        lines.append([model["label"], *line])
    return ["validation loss at rate", *rates], lines


def tuning_runs(summary: dict[str, Any]) -> str:
    """Name the runs of a model at one rate."""
    first, *more = summary["tuning_seeds"]
    if not more:
        return f"one run of seed {first}"
    return f"{1 + len(more)} runs of seeds {first} to {more[-1]}, their mean,"


def rates_note(summary: dict[str, Any]) -> str:
    """Return what the choice of rates does to all other numbers."""
    return (
        f"Each is of {tuning_runs(summary)} on {short_count(summary['tuning_tokens'])} "
        "tokens, in bold that of the rate chosen. All other "
        "numbers are conditional on the rates chosen: no interval holds that another run, or rates "
        "between these, might have chosen otherwise."
    )


def _rates_table(summary: dict[str, Any]) -> str:
    if not (found := tuned_lines(summary)):
        return ""
    return f"{markdown_table(*found)}\n\n{rates_note(summary)}"


def _said(pair: dict[str, Any] | None, asked: int) -> tuple[str, str]:
    """A difference with its interval, and its verdict.

    Args:
        asked: seeds that it should be over.
    """
    if pair is None:
        return "", ""
    seeds = "" if pair["n"] == asked else f" ({pair['n']} of {asked})"
    if pair["mean"] is None:
        return f"n/a{seeds}", WORDS[pair["verdict"]]
    interval = "" if pair["low"] is None else f" [{pair['low']:+.3f}, {pair['high']:+.3f}]"
    return f"{pair['mean']:+.3f}{interval}{seeds}", WORDS[pair["verdict"]]


def _scaled_table(summary: dict[str, Any], text: dict[str, Any]) -> str:
    if not (found := scaled_lines(summary, text)):
        return ""
    table = markdown_table(*found)
    return f"With positions (RoPE) or attention logits scaled to the length:\n\n{table}"


def scaled_lines(
    summary: dict[str, Any], text: dict[str, Any]
) -> tuple[list[str], list[list[str]]] | None:
    """Perplexity beyond the training length with each way of scaling positions or logits.

    Returns the head and the lines of the table; None where nothing was scaled.
    """
    trained = summary["training_length"]
    lengths = sorted({c["length"] for c in text["cells"] if c["length"] > trained})
    scaled = [cell for cell in text["cells"] if cell["method"] != "none"]
    if not scaled:
        return None
    labels = {model["model"]: model["label"] for model in summary["models"]}
    cells = {(c["model"], c["method"], c["length"]): c["perplexity"] for c in text["cells"]}
    head, lines = ["model", "method", *(f"ppl at {length:,}" for length in lengths)], []
    for model, method in dict.fromkeys((cell["model"], cell["method"]) for cell in scaled):
        values = [value(cells.get((model, method, length)), 2) for length in lengths]
        lines.append([labels[model], method, *values])
    return head, lines


def rule(summary: dict[str, Any]) -> str:
    """Return what the words mean, and what was not trained to its end."""
    texts = (summary, *summary["held_out"].values())
    made = [pair["comparisons"] for text in texts for pair in text["comparisons"]]
    said = ""
    if made:
        said = (
            "Verdicts: *lower* and *higher* where the paired interval over seeds and documents (in "
            "brackets) leaves out zero, otherwise *unclear*. Intervals are corrected for "
            f"{made[0]} comparisons: the chance of any wrong word among them is at most 5%."
        )
    if any(model["tuned"] for model in summary["models"]):
        said += " Rates were chosen by runs that are not in the tables; ≤ and ≥ mark the outermost."
    if summary["diverged"]:
        said += f" Training diverged in {', '.join(summary['diverged'])}."
    if any(pair["lost"] for text in texts for pair in text["comparisons"]):
        said += (
            " A difference of which a seed diverged, or has no finite loss, is *unclear* and has "
            "no interval: the seeds that are left are no sample."
        )
    if any(_is_partial(cell["loss"]) for text in texts for cell in text["cells"]):
        said += " (n of N): so many of the seeds asked for are in a number."
    return said.strip()


def value(summary: dict[str, Any] | None, places: int) -> str:
    """Show a mean with its deviation over seeds."""
    if summary is None:
        return "n/a"
    # A perplexity far from the others needs no decimals.
    places = places if summary["mean"] < 1000 else 0
    text = f"{summary['mean']:,.{places}f}"
    if summary["sd"] is not None:
        text += f" ± {summary['sd']:,.{places}f}"
    return f"{text} ({summary['n']} of {summary['asked']})" if _is_partial(summary) else text


def _is_partial(summary: dict[str, Any] | None) -> bool:
    """Return True if seeds that were asked for are not in a mean."""
    return summary is not None and summary["n"] != summary["asked"]
