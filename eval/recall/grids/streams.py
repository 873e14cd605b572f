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
that each model starts as the one without them, and a rate chosen for each on a seed, and of a text
on documents, that are not reported. None has positions: softmax and linear attention know order by
causality and convolution alone.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from cat_lm.core.errors import UserError
from cat_lm.core.files import finite, write_json, write_text
from cat_lm.core.outputs import PICTURES, claim_outputs, named
from cat_lm.data.manifest import read_manifest
from eval.common.comparison import compare, ratio_error
from eval.common.grids.execution import Execution, alone_in
from eval.common.grids.summary import diverged, training
from eval.common.grids.tuning import Choice, all_records, run_tuned
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


# Compared beside each line and the same without filters; fixed before the runs of this protocol,
# and after those of an earlier one, whose numbers decide none of these.
CONTRASTS = (
    *((Line("k"), Line("q")), (Line("k"), Line("v"))),
    *((Line(streams, SHORT), Line(streams)) for streams in ("k", "qkv")),
    *((Line(streams), Line(streams, shared_kv=True)) for streams in ("none", "k", "qkv")),
)
# Over no filters of separate keys and values: of linear less that of softmax attention. The last is
# the post's: what K = V costs without filters.
GAINS = (Line("k"), Line("qkv"), Line("none", shared_kv=True))

Spot = tuple[str, str, str]  # row, column and line
Sides = tuple[tuple[Spot, ...], tuple[Spot, ...]]  # the values to add, and to take away
Found = Mapping[Spot, dict[int, dict[str, Any]]]  # the records of each seed


@dataclass(frozen=True)
class Scale:
    """Fix how large the ablation is: recall with one layer, then text with `layers`.

    Attributes:
        rates, text_rates: learning rates to choose from.
        documents: held-out ones of each text that are scored.
        choosing: held-out ones of each text before them, by which rates are chosen.
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
    choosing: int


_RATES = (3e-3, 1e-2, 3e-2)
SCALES = {
    "smoke": Scale(16, 64, 16, 256, 1, 64, (1e-2,), 2, 1, 32, 4, (3e-3,), 4, 2),
    "cpu": Scale(64, 128, 32, 16_000, 2, 64, _RATES, 3, 2, 64, 1_000, _RATES, 200, 50),
    "paper": Scale(
        *(128, 8192, 128, 100_000, 32, 256, (1e-3, 3e-3, 1e-2), 3),
        *(12, 1024, 20_000, (3e-4, 1e-3, 3e-3), 400, 100),
    ),
}


def specification(mixer: str, conv_type: str, line: Line) -> str:
    """Return a mixer's options; without filters their kind and window are nothing, and left out."""
    options = [mixer, f"streams={line.streams}"]
    if line.streams != "none":
        options += [f"window={line.window}", f"conv_type={conv_type}", "init=identity"]
    return ",".join(options + ["shared_kv=true"] * line.shared_kv)


def plan(
    scale: Scale, texts: Sequence[str], rows: Sequence[str] = (), columns: Sequence[str] = ()
) -> list[Place]:
    """All places: a row for recall and one a text, a column a mixer and kind of filter.

    Args:
        rows, columns: by their names; none: all.

    Raises:
        UserError: a text that is no prepared data, has too few held-out documents, or the name of
            another; a row or column that is not there.
    """
    bases = [(RECALL, _recall(scale), scale.rates)]
    for data in texts:
        row = f"{TEXT}: {Path(data).resolve().name}"
        if row in (other for other, *_ in bases):
            raise UserError(f"--data {data}: there is another folder of this name")
        bases.append((row, _language(scale, data), scale.text_rates))
    bases = _chosen("--rows", {base[0]: base for base in bases}, rows)
    kinds = {f"{name}, {kind}": (name, kind) for name in MIXERS for kind in CONV_TYPES}
    return [
        Place(
            Run(row, f"{name}, {kind}", line.name, make(specification(MIXERS[name], kind, line))),
            rates,
            scale.seeds,
        )
        for row, make, rates in bases
        for name, kind in _chosen("--columns", kinds, columns)
        for line in LINES
    ]


def _chosen(option: str, known: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    """Return those that are named, in their own order; none named: all. Raises UserError."""
    for name in names:
        if name not in known:
            raise UserError(f"{option} {name!r}: choose among {'; '.join(known)}")
    return [value for name, value in known.items() if name in (names or known)]


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
        stop_above=None,  # one that learns sooner is not to be trained for less
    )


def _language(scale: Scale, data: str) -> Callable[[str], LanguageCell]:
    """The call that makes a cell of a text for a mixer; raises UserError where data do not do."""
    manifest = read_manifest(data)
    documents = manifest["splits"]["validation"]["documents"]
    check_documents(f"--data {data}", documents, scale.documents, scale.choosing)
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
        choosing_documents=scale.choosing,
    )


def ablation(
    scale_name: str,
    texts: Sequence[str],
    out: Path,
    execution: Execution,
    seeds: int | None = None,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
) -> dict[str, Any] | None:
    """Estimates, runs what is not finished, and writes streams.json, .csv, .md and a picture.

    Args:
        seeds: runs of each model at its rate; none: the scale's.
        rows, columns: of the page, by their names; none: all.

    Returns:
        What streams.json got, or none after an estimate alone.
    """
    scale = SCALES[scale_name]
    places = plan(replace(scale, seeds=seeds or scale.seeds), texts, rows, columns)
    shown = _names(places)
    left_out = [name for name in _names(plan(scale, texts)) if name not in shown]
    with alone_in(out, execution):
        if not execution.estimate_only:
            claim_outputs(out, "streams.json", named("streams", ".md", ".csv", *PICTURES))
        found = run_tuned(f"streams at {scale_name} scale", places, out, execution)
    if found is None:
        return None
    lines, contrasts = summary(found)
    record = {
        "scale": scale_name,
        "data": list(texts),
        "not_run": left_out,
        "lines": lines,
        "contrasts": contrasts,
        "trained": training(all_records(places, out)),
        "diverged": diverged((run, _value(record)) for run, record, _ in found),
        "provenance": provenance(),
    }
    told = page.markdown(record)
    write_json(out / "streams.json", finite(record))  # a rate may diverge
    write_text(out / "streams.md", told)
    write_text(out / "streams.csv", page.csv_text(lines))
    save_figure(page.draw(lines), out / "streams")
    print(told)
    return record


def _names(places: Sequence[Place]) -> list[str]:
    """The page's rows and columns, in their order."""
    runs = [place.run for place in places]
    return list(dict.fromkeys([run.row for run in runs] + [run.column for run in runs]))


def summary(
    rows: Sequence[tuple[Run, dict[str, Any], Choice]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Gather the values of each row, column and line over the seeds, and what is compared.

    `value` is accuracy for recall, where more is better, and nats a token for text, where less is.
    Comparisons made together are all of a task: of every line with the same without filters, and
    CONTRASTS and GAINS.

    Returns:
        The lines, and the contrasts of which all runs are there.
    """
    found: Found = defaultdict(dict)
    choices: dict[Spot, Choice] = {}
    for run, record, choice in rows:
        place = (run.row, run.column, run.line)
        found[place][run.cell.seed], choices[place] = record, choice
    filtered = {place: less for place in found if (less := _less_no_filters(place, found))}
    contrasts = list(_contrasts(found))
    together = Counter(row for row, *_ in (*filtered, *(place for place, _ in contrasts)))
    lines = []
    for place, choice in choices.items():
        of_row = together[place[0]]
        less = _difference(*filtered[place], found, of_row) if place in filtered else None
        lines.append(_line(place, found[place], choice) | {"less_no_filters": less})
    told = [
        {"row": row, "mixer": column, "contrast": name, **difference}
        for (row, column, name), sides in contrasts
        if (difference := _difference(*sides, found, together[row]))
    ]
    return lines, told


def _less_no_filters(place: Spot, found: Found) -> Sides | None:
    """A line and the same without filters; none for the latter."""
    row, column, name = place
    line = next(line for line in LINES if line.name == name)
    plain = (row, column, line.baseline)
    return None if line.streams == "none" or plain not in found else ((place,), (plain,))


def _contrasts(found: Found) -> Iterator[tuple[Spot, Sides]]:
    """Row, column and name of each contrast of which all runs are there, with its two sides."""
    none = Line("none").name
    for row, column in dict.fromkeys(place[:2] for place in found):
        for lines in CONTRASTS:
            name = " less ".join(line.name for line in lines)
            one, other = ((row, column, line.name) for line in lines)
            if one in found and other in found:
                yield (row, column, name), ((one,), (other,))
    for row, kind in itertools.product(dict.fromkeys(place[0] for place in found), CONV_TYPES):
        of_softmax, of_linear = (f"{mixer}, {kind}" for mixer in SUMS)
        for line in GAINS:
            plus = ((row, of_linear, line.name), (row, of_softmax, none))
            minus = ((row, of_linear, none), (row, of_softmax, line.name))
            if found.keys() >= {*plus, *minus}:
                yield (row, f"{page.BETWEEN}, {kind}", f"{line.name} less {none}"), (plus, minus)


def _line(place: Spot, records: Mapping[int, dict[str, Any]], choice: Choice) -> dict[str, Any]:
    row, column, name = place
    values = {seed: _value(record) for seed, record in records.items()}
    line = next(line for line in LINES if line.name == name)
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
        "standard_error_of_documents": next(iter(records.values())).get("standard_error"),
    }


def _value(record: dict[str, Any]) -> float:
    return record["loss"] if "loss" in record else record["accuracy"]


def _difference(
    plus: Sequence[Spot], minus: Sequence[Spot], found: Found, together: int
) -> dict[str, Any] | None:
    """The sum of some places' values less the sum of others', seed by seed, of as many."""
    sums = [
        {seed: math.fsum(_value(found[place][seed]) for place in places) for seed in seeds}
        for places in (plus, minus)
        for seeds in [set.intersection(*(set(found[place]) for place in places))]
    ]
    error = _document_error(plus, minus, found)
    documents = None if error is None else len(_tokens(found[plus[0]]))
    difference = compare(*sums, together, error, documents)
    return None if difference is None else asdict(difference)


def _document_error(plus: Sequence[Spot], minus: Sequence[Spot], found: Found) -> float | None:
    """The standard error, over documents, of the mean difference; none without documents."""
    seeds = set.intersection(*(set(found[place]) for place in (*plus, *minus)))
    tokens = _tokens(found[plus[0]])
    if len(tokens) < 2:
        return None
    signs = [(place, 1) for place in plus] + [(place, -1) for place in minus]
    sums = [0.0] * len(tokens)
    for seed, (place, sign) in itertools.product(sorted(seeds), signs):
        for number, nats in enumerate(found[place][seed]["documents"]["nats"]):
            sums[number] += sign * nats / len(seeds)
    return ratio_error(sums, tokens)


def _tokens(records: Mapping[int, dict[str, Any]]) -> list[int]:
    """Return the tokens of the scored documents, which are every model's; or nothing."""
    return next(iter(records.values())).get("documents", {}).get("tokens", [])
