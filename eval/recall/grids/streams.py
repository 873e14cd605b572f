"""Ablate the convolved streams: every subset of q, k and v, on recall and on text.

Two claims stand against each other. Su's post "Why do linear attention models add short conv?" says
that in linear attention the keys' convolution matters most, because it makes the pairs that a layer
memorises (k_{t−1}, v_t) instead of (k_t, v_t), for which a window of 2 suffices, and that with
K = V nothing can be learned without it. Li et al. (CAT, arXiv version, section 7) remark that in
real runs convolving keys and queries does not help.

So: softmax attention, linear attention, DeltaNet and Gated DeltaNet, each with a convolution on
every subset of its streams, with one filter a head (CAT's) and one a channel (the post's), with
separate and with shared keys and values, and with windows of 2. All else is the same: heads, no
biases, no activation after the filters, no dropout inside, filters that start as the identity, so
that each model starts as the one without them, and a rate chosen for each on a seed that is not
reported. None has positions: softmax and linear attention know order by causality and convolution
alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from cat_lm.data.manifest import read_manifest
from cat_lm.errors import UserError
from cat_lm.io.files import finite, write_json, write_text
from eval.common.comparison import compare, ratio_error
from eval.common.grids.execution import Execution
from eval.common.grids.tuning import Choice, run_tuned
from eval.common.outputs import PICTURES, claim_outputs, named
from eval.common.provenance import provenance
from eval.common.style import save_figure
from eval.recall.grids.plan import Place, Run
from eval.recall.show import streams as page
from eval.recall.train.cell import Cell
from eval.recall.train.held_out import check_documents
from eval.recall.train.language import LanguageCell

WINDOW, SHORT = 4, 2  # of DeltaNet and its kin, and what the post says suffices
CONV_TYPES = ("head", "depthwise")
HEADS = 2
# As wide values as keys in all of them, so that K = V is possible.
MIXERS = {
    "softmax attention": f"cat:heads={HEADS},bias=false,dropout=0.0",
    "linear attention": f"lincat:heads={HEADS},bias=false",
    "DeltaNet": f"deltanet:heads={HEADS},activation=none",
    "Gated DeltaNet": f"gated-deltanet:heads={HEADS},activation=none,expand_v=1.0",
}
SUMS = ("softmax attention", "linear attention")  # over positions, which know no order
RECALL, TEXT = page.RECALL, "text"


class Line(NamedTuple):
    """What differs between the lines of a table: streams, window, and whether K = V."""

    streams: str
    window: int = WINDOW
    shared_kv: bool = False

    @property
    def name(self) -> str:
        short = f", W = {self.window}" if self.window != WINDOW else ""
        return f"{'K = V, ' if self.shared_kv else ''}{self.streams}{short}"

    @property
    def baseline(self) -> str:
        """Name the line without filters that it is compared with."""
        return Line("none", shared_kv=self.shared_kv).name


LINES = (
    *(Line(streams) for streams in ("none", "q", "k", "v", "qk", "qv", "kv", "qkv")),
    *(Line(streams, SHORT) for streams in ("k", "qkv")),
    *(Line(streams, shared_kv=True) for streams in ("none", "q", "k", "v", "qkv")),
    *(Line(streams, SHORT, shared_kv=True) for streams in ("k", "qkv")),
)


@dataclass(frozen=True)
class Scale:
    """Fix how large the ablation is: recall with one layer, then text with `layers`.

    Attributes:
        rates, text_rates: learning rates to choose from.
        documents: held-out ones of each text that are scored.
    """

    d_model: int
    vocab_size: int
    seq_len: int
    examples: int
    epochs: int
    batch_size: int
    rates: tuple[float, ...]
    seeds: int
    layers: int
    text_len: int
    text_steps: int
    text_rates: tuple[float, ...]
    documents: int


_RATES = (3e-3, 1e-2, 3e-2)
SCALES = {
    "smoke": Scale(16, 64, 16, 256, 1, 64, (1e-2,), 2, 1, 32, 4, (3e-3,), 4),
    "cpu": Scale(64, 128, 32, 16_000, 2, 64, _RATES, 3, 2, 64, 1_000, _RATES, 200),
    "paper": Scale(
        *(128, 8192, 128, 100_000, 32, 256, (1e-3, 3e-3, 1e-2), 3),
        *(12, 1024, 20_000, (3e-4, 1e-3, 3e-3), 400),
    ),
}


def specification(mixer: str, conv_type: str, line: Line) -> str:
    """Give a mixer's options; without filters their kind and window are nothing, and left out."""
    options = [mixer, f"streams={line.streams}"]
    if line.streams != "none":
        options += [f"window={line.window}", f"conv_type={conv_type}", "init=identity"]
    return ",".join(options + ["shared_kv=true"] * line.shared_kv)


def plan(scale: Scale, texts: Sequence[str]) -> list[Place]:
    """All places: a row for recall and one a text, a column a mixer and kind of filter.

    Raises:
        UserError: a text that is no prepared data, has too few held-out documents, or the name of
            another.
    """
    bases = [(RECALL, _recall(scale), scale.rates)]
    for data in texts:
        row = f"{TEXT}: {Path(data).resolve().name}"
        if row in (other for other, *_ in bases):
            raise UserError(f"--data {data}: there is another folder of this name")
        bases.append((row, _language(scale, data), scale.text_rates))
    return [
        Place(Run(row, f"{name}, {kind}", line.name, make(specification(mixer, kind, line))), *how)
        for row, make, rates in bases
        for how in [(rates, scale.seeds)]
        for name, mixer in MIXERS.items()
        for kind in CONV_TYPES
        for line in LINES
    ]


def _recall(scale: Scale) -> Callable[[str], Cell]:
    """The call that makes a cell of recall for a mixer."""
    return lambda mixer: Cell(
        f"mqar:vocab_size={scale.vocab_size}",
        mixer,
        scale.d_model,
        scale.seq_len,
        layers=1,
        epochs=scale.epochs,
        train_examples=scale.examples,
        test_examples=1_000,
        batch_size=scale.batch_size,
    )


def _language(scale: Scale, data: str) -> Callable[[str], LanguageCell]:
    """The call that makes a cell of a text for a mixer; raises UserError where data do not do."""
    manifest = read_manifest(data)
    documents = manifest["splits"]["validation"]["documents"]
    check_documents(f"--data {data}", documents, scale.documents)
    return lambda mixer: LanguageCell(
        data,
        manifest["fingerprint"],
        mixer,
        scale.d_model,
        scale.text_len,
        scale.layers,
        scale.text_steps,
        scale.text_rates[0],
        documents=scale.documents,
    )


def ablation(
    scale_name: str,
    texts: Sequence[str],
    out: Path,
    execution: Execution,
    seeds: int | None = None,
) -> dict[str, Any] | None:
    """Estimates, runs what is not finished, and writes streams.json, .csv, .md and a picture.

    Args:
        seeds: runs of each model at its rate; none: the scale's.

    Returns:
        What streams.json got, or none after an estimate alone.
    """
    scale = SCALES[scale_name]
    places = plan(replace(scale, seeds=seeds or scale.seeds), texts)
    if not execution.estimate_only:
        claim_outputs(out, "streams.json", named("streams", ".md", ".csv", *PICTURES))
    rows = run_tuned(f"streams at {scale_name} scale", places, out, execution)
    if rows is None:
        return None
    lines = summary(rows)
    record = {"scale": scale_name, "data": list(texts), "lines": lines, "provenance": provenance()}
    write_json(out / "streams.json", finite(record))  # a rate may diverge
    write_text(out / "streams.md", page.markdown(lines))
    write_text(out / "streams.csv", page.csv_text(lines))
    save_figure(page.draw(lines), out / "streams")
    print(page.markdown(lines))
    return record


def summary(rows: Sequence[tuple[Run, dict[str, Any], Choice]]) -> list[dict[str, Any]]:
    """Give each row, column and line its values over the seeds, and how it differs from no filters.

    `value` is accuracy for recall, where more is better, and nats a token for text, where less is.
    Comparisons made together are those of a column: of one mixer with one kind of filter on one
    task.
    """
    found: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = defaultdict(dict)
    choices: dict[tuple[str, str, str], Choice] = {}
    for run, record, choice in rows:
        place = (run.row, run.column, run.line)
        found[place][run.cell.seed], choices[place] = record, choice
    return [_line(place, found, choices[place]) for place in found]


def _line(
    place: tuple[str, str, str], found: Mapping[Any, dict[int, dict[str, Any]]], choice: Choice
) -> dict[str, Any]:
    row, column, name = place
    values = {seed: _value(record) for seed, record in found[place].items()}
    line = next(line for line in LINES if line.name == name)
    of_column = [other for other in LINES if other.streams != "none"]
    difference = None
    if line in of_column:
        plain = found[row, column, line.baseline]
        difference = compare(
            values,
            {seed: _value(record) for seed, record in plain.items()},
            len(of_column),
            error := _document_error(found[place], plain),
            None if error is None else len(_documents(plain)["tokens"]),
        )
    return {
        "row": row,
        "mixer": column,
        "streams": name,
        "by_algebra": row == RECALL and column.startswith(SUMS) and line.streams in ("none", "q"),
        "rate": choice.rate,
        "rates_tried": {f"{rate:g}": choice.tried[rate] for rate in sorted(choice.tried)},
        "rate_on_grid_edge": choice.on_edge,
        "mean": sum(values.values()) / len(values),
        "min": min(values.values()),
        "max": max(values.values()),
        "runs": {str(seed): value for seed, value in values.items()},
        "standard_error_of_documents": next(iter(found[place].values())).get("standard_error"),
        "less_no_filters": None if difference is None else asdict(difference),
    }


def _value(record: dict[str, Any]) -> float:
    return record["loss"] if "loss" in record else record["accuracy"]


def _document_error(
    these: Mapping[int, dict[str, Any]], others: Mapping[int, dict[str, Any]]
) -> float | None:
    """The standard error, over documents, of the mean difference; none without documents."""
    seeds = these.keys() & others.keys()
    documents = _documents(these)
    if len(documents.get("tokens", ())) < 2:
        return None
    differences = [
        [a - b for a, b in zip(_nats(these[s]), _nats(others[s]), strict=True)] for s in seeds
    ]
    sums = [sum(of_document) / len(seeds) for of_document in zip(*differences, strict=True)]
    return ratio_error(sums, documents["tokens"])


def _documents(records: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """Give nats and tokens of the scored documents, whose tokens are every model's; or nothing."""
    return next(iter(records.values())).get("documents", {})


def _nats(record: dict[str, Any]) -> list[float]:
    return record["documents"]["nats"]
