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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cat_lm.data.manifest import read_manifest
from cat_lm.errors import UserError
from cat_lm.io.files import write_json, write_text
from eval.common.outputs import PICTURES, claim_outputs, named
from eval.common.provenance import provenance
from eval.common.style import save_figure
from eval.recall.grids.plan import Place, Run
from eval.recall.grids.tuning import run_tuned
from eval.recall.show import streams as page
from eval.recall.train.execution import Execution
from eval.recall.train.held_out import check_documents
from eval.recall.train.language import LanguageCell
from eval.recall.train.trial import Cell

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
RECALL, TEXT = "MQAR", "text"


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
