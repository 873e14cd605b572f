"""Which of q, k and v needs the convolution, on recall and on text.

Two claims stand against each other. Su's post "Why do linear attention models add short conv?" says
that in linear attention the keys' convolution matters most, because it makes the pairs that a layer
memorises (k_{t−1}, v_t) instead of (k_t, v_t), for which a window of 2 suffices, and that with
K = V nothing can be learned without it. Li et al. (CAT, arXiv version, section 7) remark that in
real runs convolving keys and queries does not help.

So softmax attention, linear attention, DeltaNet and Gated DeltaNet are trained with a convolution
on every subset of their streams: with one filter a head (CAT's) and one a channel (the post's),
separate and shared keys and values, and windows of 2. All else is the same, filters start as the
identity, and none has positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from cat_lm.core.errors import UserError
from cat_lm.data.manifest import read_manifest
from eval.lab.contrasts import Contrast
from eval.lab.frame import Line, Record
from eval.lab.places import Place, Run
from eval.lab.study import Study, StudyOptions, choose
from eval.recall.cell import Cell
from eval.recall.language import LanguageCell, check_documents

WINDOW, SHORT = 4, 2  # windows of DeltaNet and related models, and the shorter one of the post
CONV_TYPES = ("head", "depthwise")
# As wide values as keys in all of them, so that K = V is possible.
MIXERS = {
    "softmax attention": "cat:heads=2,bias=false,dropout=0.0",
    "linear attention": "lincat:heads=2,bias=false",
    "DeltaNet": "deltanet:heads=2,activation=none",
    "Gated DeltaNet": "gated-deltanet:heads=2,activation=none,expand_v=1.0",
}
RECALL, TEXT = "MQAR", "text"


class Streams(NamedTuple):
    """The variant of a line: the convolved streams, the window, and whether K = V."""

    streams: str
    window: int = WINDOW
    shared_kv: bool = False

    @property
    def name(self) -> str:
        short = f", W = {self.window}" if self.window != WINDOW else ""
        streams = "no filters" if self.streams == "none" else self.streams
        return f"{'K = V, ' if self.shared_kv else ''}{streams}{short}"

    @property
    def baseline(self) -> str:
        """Return the name of the line without filters that it is compared with."""
        return Streams("none", shared_kv=self.shared_kv).name


LINES = (
    *(Streams(streams) for streams in ("none", "q", "k", "v", "qk", "qv", "kv", "qkv")),
    *(Streams(streams, SHORT) for streams in ("k", "qkv")),
    *(Streams(streams, shared_kv=True) for streams in ("none", "q", "k", "v", "qkv")),
    *(Streams(streams, SHORT, shared_kv=True) for streams in ("k", "qkv")),
)
# Compared in addition to each line and the same without filters; fixed before the runs.
PAIRS = (
    *((Streams("k"), Streams("q")), (Streams("k"), Streams("v"))),
    *((Streams(streams, SHORT), Streams(streams)) for streams in ("k", "qkv")),
    *((Streams(streams), Streams(streams, shared_kv=True)) for streams in ("none", "k", "qkv")),
)
# What filters change in linear attention minus what they change in softmax attention. The last is
# the post's: what K = V costs without filters.
GAINS = (Streams("k"), Streams("qkv"), Streams("none", shared_kv=True))


class Scale(NamedTuple):
    """Fix how large the study is: recall with one layer, then text.

    Attributes:
        recall, text: options of their cells; rates, text_rates: learning rates to choose from.
    """

    vocab_size: int
    recall: dict[str, int]
    rates: tuple[float, ...]
    seeds: int
    text: dict[str, int]
    text_rates: tuple[float, ...]


def _recall(d_model: int, seq_len: int, rows: int, epochs: int, batch_size: int) -> dict[str, int]:
    sizes = {"d_model": d_model, "seq_len": seq_len, "train_examples": rows}
    return sizes | {"epochs": epochs, "batch_size": batch_size}


def _text(
    d_model: int, layers: int, seq_len: int, steps: int, documents: int, choosing: int
) -> dict[str, int]:
    """Return options of a cell: `choosing` held-out documents before those scored choose rates."""
    sizes = {"d_model": d_model, "layers": layers, "seq_len": seq_len, "steps": steps}
    return sizes | {"documents": documents, "choosing_documents": choosing}


_RATES, _PAPER_RATES = (3e-3, 1e-2, 3e-2), (1e-3, 3e-3, 1e-2)
SCALES = {
    "smoke": Scale(64, _recall(16, 16, 256, 1, 64), (1e-2,), 2, _text(16, 1, 32, 4, 4, 2), (3e-3,)),
    "cpu": Scale(
        *(128, _recall(64, 32, 16_000, 2, 64), _RATES, 3, _text(64, 2, 64, 1_000, 200, 50), _RATES)
    ),
    "paper": Scale(
        *(8192, _recall(128, 128, 100_000, 32, 256), _PAPER_RATES, 3),
        *(_text(128, 12, 1024, 20_000, 400, 100), (3e-4, 1e-3, 3e-3)),
    ),
}


def specification(mixer: str, conv_type: str, line: Streams) -> str:
    """Return a mixer's options; without filters their kind and window are nothing, and left out."""
    options = [mixer, f"streams={line.streams}"]
    if line.streams != "none":
        options += [f"window={line.window}", f"conv_type={conv_type}", "init=identity"]
    return ",".join(options + ["shared_kv=true"] * line.shared_kv)


def plan_places(asked: StudyOptions) -> list[Place]:
    """Return the places of a row for recall and for each text, and of a column for each mixer and
    kind of filter.

    Raises:
        UserError: a text is no prepared data, has too few held-out documents or the name of
            another text, or a row or column is unknown.
    """
    scale = SCALES[asked.scale]
    fixed = {"layers": 1, "test_examples": 1_000}
    # One that learns sooner is not to be trained for less.
    base = Cell(f"mqar:vocab_size={scale.vocab_size}", "", stop_above=None, **fixed, **scale.recall)
    bases: dict[str, tuple[Any, tuple[float, ...]]] = {RECALL: (base, scale.rates)}
    for data in asked.more.get("data", ()):
        row, manifest = f"{TEXT}: {Path(data).resolve().name}", read_manifest(data)
        if row in bases:
            raise UserError(f"--data {data}: there is another folder of this name")
        documents, text = manifest["splits"]["validation"]["documents"], scale.text
        check_documents(f"--data {data}", documents, text["documents"], text["choosing_documents"])
        how = {"mixer": "", "lr": scale.text_rates[0], **text}
        bases[row] = LanguageCell(data, manifest["fingerprint"], **how), scale.text_rates
    columns = {f"{name}, {kind}": (name, kind) for name in MIXERS for kind in CONV_TYPES}
    found = []
    for row in choose("--rows", bases, asked.rows):
        base, rates = bases[row]
        for column in choose("--columns", columns, asked.columns):
            name, kind = columns[column]
            for line in LINES:
                cell = replace(base, mixer=specification(MIXERS[name], kind, line))
                run = Run(row, column, line.name, cell)
                found.append(Place(run, rates, asked.seeds or scale.seeds))
    return found


def measured_values(run: Run, record: Record) -> dict[int, dict[str, float]]:
    """Return the accuracy of recall, or the loss on held-out documents in nats a token."""
    documents = {name: record[name] for name in ("documents",) if name in record}
    return {run.cell.seq_len: {"value": record.get("loss", record["accuracy"]), **documents}}


def contrasts(lines: Sequence[Line]) -> list[Contrast]:
    """Compare each line with its baseline without filters, then the lines of PAIRS and GAINS."""
    at = {(line["row"], line["column"], line["line"]): line for line in lines}
    panels = dict.fromkeys((row, column) for row, column, _ in at)
    pairs = [(line.name, line.baseline) for line in LINES if line.streams != "none"]
    pairs += [(one.name, other.name) for one, other in PAIRS]
    found = [
        Contrast(*panel, None, f"{one} - {other}", (at[*panel, one],), (at[*panel, other],))
        for panel in panels
        for one, other in pairs
        if {(*panel, one), (*panel, other)} <= at.keys()
    ]
    return [*found, *_gains(at, dict.fromkeys(row for row, _ in panels))]


def _gains(at: Mapping[tuple, Line], rows: Sequence[str]) -> Iterator[Contrast]:
    none = Streams("none").name
    for row, kind, line in itertools.product(rows, CONV_TYPES, GAINS):
        softmax, linear = (
            f"{mixer}, {kind}" for mixer in ("softmax attention", "linear attention")
        )
        plus = ((row, linear, line.name), (row, softmax, none))
        minus = ((row, linear, none), (row, softmax, line.name))
        if {*plus, *minus} <= at.keys():
            sides = (tuple(at[place] for place in side) for side in (plus, minus))
            column = f"linear - softmax attention, {kind}"
            yield Contrast(row, column, None, f"{line.name} - {none}", *sides)


ENTRY = Study(
    "streams",
    "which of q, k and v needs the convolution, on recall and on text",
    plan_places,
    measured_values,
    source="CAT, arXiv version, section 7",
    claim="Convolving keys and queries does not help in real runs.",
    notes="Without a filter on k or v, softmax and linear attention sum over positions what each "
    "token gives by itself: exchanging the values of two keys changes no answer of a query whose "
    "window holds no pair. Their accuracies on MQAR with no filter, or one on q, are therefore "
    "known by algebra, and are no finding.",
    measures={"": "value", RECALL: "accuracy", TEXT: "loss on held-out documents, nats a token"},
    figure="strips",
    contrasts=contrasts,
    by_row=True,
    options=("rows", "columns", "data"),
)
