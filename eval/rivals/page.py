"""The comparison's tables, in Markdown for RESULTS.md, and its page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.common.html import render
from eval.common.style import page_svg, short_count
from eval.common.text_table import markdown_table
from eval.rivals.figure import recall_perplexities, rivals_figure
from eval.rivals.rows import TOLERANCE
from eval.rivals.text_recall import BINS, LAST, RARE, RECALL, REST
from eval.small_study.questions import YARN
from eval.small_study.tables import (
    EDGES,
    comparison_columns,
    comparison_lines,
    rates_note,
    rule,
    scaled_lines,
    setting,
    tuned_lines,
    tuning_runs,
    value,
)

TEMPLATE = Path(__file__).with_name("templates") / "rivals.html"
TITLE = "CAT and its rivals at equal parameters, tokens and care"
Table = tuple[list[str], list[list[str]]]


def markdown(summary: dict[str, Any]) -> str:
    """All of it, ready to be put into a larger document."""
    parts = [*introduction(summary)]
    for title, table, note in tables(summary):
        parts += [f"**{title}**", markdown_table(*table), note]
    parts += conclusions(summary)
    return "\n\n".join(part for part in parts if part) + "\n"


def page(summary: dict[str, Any]) -> str:
    """The page, with the picture in it."""
    return render(
        TEMPLATE,
        title=TITLE,
        introduction=introduction(summary),
        picture=page_svg(rivals_figure(summary), "rivals", "the comparison in four panels"),
        tables=[
            {"title": title, "head": head, "lines": [list(map(_cell, line)) for line in lines]}
            | {"note": note}
            for title, (head, lines), note in tables(summary)
        ],
        conclusions=conclusions(summary),
        commands=[summary["command"]],
        facts=_facts(summary),
    )


def introduction(summary: dict[str, Any]) -> list[str]:
    """Return what was trained, and how the rates were chosen."""
    reported, choosing = summary["training_tokens"], summary["tuning_tokens"]
    return [
        setting(summary),
        f"All rows have the same number of parameters within {TOLERANCE:.0%} and read the same "
        f"tokens in the same order. The rate of each is the best of several by "
        f"{tuning_runs(summary)} on {short_count(choosing)} tokens, which none of the numbers is "
        f"of; the runs reported have {short_count(reported)}.",
    ]


def tables(summary: dict[str, Any]) -> list[tuple[str, Table, str]]:
    """Make all tables: title, head and lines, note."""
    found = [("Rows", main_lines(summary), _main_note(summary))]
    if pairs := all_differences(summary):
        found.append(("Differences", comparison_lines(summary, pairs), rule(summary)))
    if scaled := scaled_lines(summary, summary):
        note = "Rows without positions to scale have no line; their perplexity is in the picture."
        found.append(("Beyond the training length, scaled", scaled, note))
    title = f"Loss on pairs seen earlier in a window of {summary['recall']['length']:,}"
    found.append((title, recall_lines(summary), _recall_note(summary)))
    for name, text in summary["held_out"].items():
        found.append((f"Loss and perplexity on {name}", held_out_lines(summary, text), ""))
        if pairs := comparison_columns(summary, text, "loss"):
            said = f"Differences on {name}", comparison_lines(summary, pairs), rule(summary)
            found.append(said)
    if tuned := tuned_lines(summary):
        found.append(("Rates tried", tuned, rates_note(summary)))
    return found


def main_lines(summary: dict[str, Any]) -> Table:
    """Return what each row is, costs and reaches."""
    trained = summary["training_length"]
    longest = max(int(n) for n in summary["models"][0]["state_bytes"])
    head = ["row", "parameters", "FLOPs a token", "tokens/s", "rate", f"loss at {trained:,}"]
    head += [f"ppl at {longest:,}", "with YaRN", f"recall ppl at {trained:,}"]
    head += [f"other ppl at {trained:,}", f"state at {trained:,}", f"at {longest:,}"]
    cells = {(c["model"], c["length"], c["method"]): c for c in summary["cells"]}
    recalled, rest = (recall_perplexities(summary, trained, name) for name in (RECALL, REST))
    lines, asked = [], len(summary["seeds"])
    for model in summary["models"]:
        name = model["model"]
        if not model["seeds"]:
            continue
        at, far = (cells.get((name, length, "none")) for length in (trained, longest))
        scaled = cells.get((name, longest, YARN))
        speed = model["tokens_per_second"]
        lines.append(
            [
                model["label"],
                f"{model['parameters']:,}" if model["parameters"] else "n/a",
                short_count(model["flops_per_token"]),
                f"{speed:,.0f}" if speed else "n/a",
                f"{EDGES[model['tuned']['edge']]}{model['rate']:g}",
                value(at and at["loss"], 3),
                value(far and far["perplexity"], 2),
                value(scaled["perplexity"], 2) if scaled else "",
                _spread(recalled.get(name), asked),
                _spread(rest.get(name), asked),
                *(f"{model['state_bytes'][str(n)] / 1024:,.1f} KiB" for n in (trained, longest)),
            ]
        )
    return head, lines


def held_out_lines(summary: dict[str, Any], text: dict[str, Any]) -> Table:
    """Return what each row reaches on a further text."""
    trained = summary["training_length"]
    longest = max((cell["length"] for cell in text["cells"]), default=trained)
    cells = {(c["model"], c["length"], c["method"]): c for c in text["cells"]}
    head = ["row", f"loss at {trained:,}", f"ppl at {longest:,}", "with YaRN"]
    lines = []
    for model in summary["models"]:
        at, far, scaled = (
            cells.get((model["model"], *place))
            for place in ((trained, "none"), (longest, "none"), (longest, YARN))
        )
        if not model["seeds"]:
            continue
        found = [value(at and at["loss"], 3), value(far and far["perplexity"], 2)]
        lines.append([model["label"], *found, value(scaled["perplexity"], 2) if scaled else ""])
    return head, lines


def _main_note(summary: dict[str, Any]) -> str:
    streams = ""
    if "bf16" in summary["trained_with"]["precision"]:
        streams = (
            "In training the residual stream of Mamba and Mamba-2 was in fp32, that of the others "
            "in bf16. "
        )
    return (
        "FLOPs: of a training step, forward and backward. Tokens/s: of training, the median over "
        "steps and seeds, beside other runs; `eval.speed train` compares speeds. Recall: tokens "
        f"whose pair with the one before stands earlier in the window and at most {RARE} times in "
        "the training text; other: all the others. State: of one sequence in decoding, in bf16 "
        f"with recurrent states in fp32. {streams}Positions are as trained but where YaRN is named."
    )


def all_differences(summary: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Gather all comparisons on the text of the training: head of a column -> differences."""
    recalled = comparison_columns(summary, summary["recall"], "recall")
    return comparison_columns(summary, summary, "loss") | recalled


def recall_lines(summary: dict[str, Any]) -> Table:
    """Losses by slice, with those of counts alone and the tokens of each."""
    recall = summary["recall"]
    names = (*BINS, RECALL, LAST, REST)
    heads = {RECALL: f"0–{RARE}", LAST: "last one", REST: "all others"}
    cells = {(c["model"], c["slice"]): c["loss"] for c in recall["cells"]}
    lines = [
        [model["label"], *(value(cells.get((model["model"], name)), 3) for name in names)]
        for model in summary["models"]
    ]
    counted = {row["slice"]: row for row in recall["bigram"]}
    losses = [counted[name]["loss"] for name in names]
    lines.append(["bigram counts", *("n/a" if x is None else f"{x:.3f}" for x in losses)])
    lines.append(["tokens", *(f"{counted[name]['tokens']:,}" for name in names)])
    return ["row", *(heads.get(name, name) for name in names)], lines


def _recall_note(summary: dict[str, Any]) -> str:
    split = short_count(summary["recall"]["training_split_tokens"])
    return (
        f"Columns: times that the pair stands in the training split ({split} tokens, of which a "
        f"run reads {short_count(summary['training_tokens'])}, some more than once where those are "
        "more). Last one: the token followed the same token the last time, too. Bigram counts: of "
        "that split, with the unigram counts as a prior; it cannot recall. "
        f"{_behind_counts(summary)}"
    )


def _behind_counts(summary: dict[str, Any]) -> str:
    """Return what the counts lose over all tokens, and which rows lose more, in all seeds or less.

    Without an interval: the counts have no seeds, and no difference from them was fixed beforehand.
    """
    slices = {row["slice"]: row for row in summary["recall"]["bigram"]}
    parts = [slices[name] for name in (RECALL, REST) if slices[name]["tokens"]]
    floor = sum(row["loss"] * row["tokens"] for row in parts) / sum(row["tokens"] for row in parts)
    losses: dict[str, list[float]] = {model["model"]: [] for model in summary["models"]}
    for row in summary["rows"]:
        read = (row["length"], row["method"]) == (summary["training_length"], "none")
        if read and row["loss"] is not None:
            losses[row["model"]].append(row["loss"])
    labels = {model["model"]: model["label"] for model in summary["models"]}
    losses = {labels[name]: values for name, values in losses.items() if values}
    behind = [name for name, values in losses.items() if min(values) > floor]
    partly = [n for n, v in losses.items() if n not in behind and statistics.mean(v) > floor]
    said = [f"Over all tokens they lose {floor:.3f}"]
    said += [f"less than every seed of {', '.join(behind)}"] if behind else []
    said += [f"less than the mean, but not than every seed, of {', '.join(partly)}"] * bool(partly)
    return "; ".join(said) + "."


def conclusions(summary: dict[str, Any]) -> list[str]:
    """Return what the differences carry, and what they do not."""
    pairs = [p for column in all_differences(summary).values() for p in column]
    for text in summary["held_out"].values():
        pairs += text["comparisons"]
    said = sum(pair["verdict"] in ("lower", "higher") for pair in pairs)
    carried = f"{said} of {len(pairs)} differences are carried by their intervals; the others "
    carried += "may be chance, however large they look."
    sizes = [model["parameters"] for model in summary["models"] if model["parameters"]]
    size = short_count(statistics.median(sizes)) if sizes else "this size"
    limits = (
        f"All of this is of {size} parameters, {short_count(summary['training_tokens'])} tokens "
        "trained on one text; it says nothing about other sizes, budgets or texts to train on, nor "
        "about speed on other machines."
    )
    return [carried, limits]


def _spread(values: Sequence[float] | None, asked: int) -> str:
    if not values:
        return "n/a"
    found = {"mean": statistics.fmean(values), "sd": None, "n": len(values), "asked": asked}
    if len(values) > 1:
        found["sd"] = statistics.stdev(values)
    return value(found, 2) if math.isfinite(found["mean"]) else "n/a"


def _cell(text: str) -> dict[str, Any]:
    """A cell of the page, whose emphasis is not Markdown's."""
    return {"text": text.strip("*"), "strong": text.startswith("**")}


def _facts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    facts = {"made": summary["date"], "machine": summary["machine"], "versions": versions}
    facts |= {"commit": summary["commit"] or "unknown", "data": summary["data"]}
    return list(facts.items())
