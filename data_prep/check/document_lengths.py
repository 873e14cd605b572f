"""Lengths of documents: counts of every length, and their picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from cat_lm.core.errors import UserError
from cat_lm.core.files import atomic_write
from cat_lm.data.corpus import TokenCorpus
from data_prep.check.integrity import document_ends

PICTURE = "document_lengths.png"
QUANTILES = {"min": 0, "25%": 0.25, "50%": 0.5, "75%": 0.75, "max": 1}
BINS_AN_OCTAVE = 2
# After Okabe and Ito, told apart by fill as well as by colour.
TRAIN, VALIDATION, INK, MUTED, GRID = "#0072b2", "#d55e00", "#1c2024", "#5f6871", "#e2e5e9"


class Lengths:
    """The lengths of a split's documents in tokens, EOD included.

    Attributes: `values`, the distinct lengths in ascending order; `counts`, documents of each. A
    few hundred thousand lengths at most are distinct, however many documents there are.
    """

    def __init__(self, corpus: TokenCorpus) -> None:
        counts: Counter[int] = Counter()
        for shard in corpus.shards:
            lengths = np.diff(document_ends(shard), prepend=0)
            values, times = np.unique(lengths, return_counts=True)
            for value, count in zip(values.tolist(), times.tolist(), strict=True):
                counts[value] += count
        self.values = np.array(sorted(counts), dtype=np.int64)
        self.counts = np.array([counts[value] for value in self.values.tolist()], dtype=np.int64)
        self.documents = int(self.counts.sum())
        self.tokens = int((self.values * self.counts).sum())
        shortest = int(self.values[0]) if self.documents else 1
        if shortest < 1 or self.tokens != corpus.num_tokens:
            raise UserError(
                f"{corpus.folder}: the lengths of the {corpus.split} documents are damaged"
            )

    def quantiles(self) -> dict[str, int]:
        """The shortest length that so large a share of the documents does not exceed."""
        if not self.documents:
            return {}
        running = np.cumsum(self.counts)
        ranks = {name: max(1, np.ceil(share * self.documents)) for name, share in QUANTILES.items()}
        return {
            name: int(self.values[np.searchsorted(running, rank)]) for name, rank in ranks.items()
        }

    def to_json(self) -> dict:
        """Documents by length: counts in [2^k, 2^(k+1)), quantiles and mean."""
        buckets: Counter[int] = Counter()
        for value, count in zip(self.values.tolist(), self.counts.tolist(), strict=True):
            buckets[1 << (value.bit_length() - 1)] += count
        return {
            "quantiles": self.quantiles(),
            "mean": self.tokens / self.documents if self.documents else None,
            "buckets": dict(sorted(buckets.items())),
        }


def draw_lengths(splits: Mapping[str, Lengths], context_length: int, file: Path) -> None:
    """Draws shares of documents and of tokens by document length, for each split, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    longest = max(int(lengths.values[-1]) for lengths in splits.values() if lengths.documents)
    octaves = np.log2(max(longest, context_length)) + 1
    edges = 2.0 ** (np.arange(0, np.ceil(octaves * BINS_AN_OCTAVE) + 1) / BINS_AN_OCTAVE)
    figure = Figure(figsize=(8.6, 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for panel, what in zip(panels, ("documents", "tokens"), strict=True):
        _draw_panel(panel, splits, what, edges, context_length)
    panels[0].set_ylabel("share", color=MUTED)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    with atomic_write(file, "wb") as stream:
        figure.savefig(stream, format="png")


def _draw_panel(
    panel, splits: Mapping[str, Lengths], what: str, edges, context_length: int
) -> None:
    for split, lengths in splits.items():
        if not lengths.documents:
            continue
        weights = lengths.counts * (1 if what == "documents" else lengths.values)
        shares, _ = np.histogram(lengths.values, edges, weights=weights / weights.sum())
        label = f"{split}: {lengths.documents:,} documents, {_short(lengths.tokens)} tokens"
        if split == "train":
            panel.stairs(shares, edges, fill=True, color=TRAIN, alpha=0.55, label=label)
        else:
            panel.stairs(shares, edges, color=VALIDATION, linewidth=1.6, label=label)
    label = f"context length {context_length:,}"
    panel.axvline(context_length, color=INK, linewidth=1, linestyle="--", label=label)
    panel.set_xscale("log", base=2)
    ticks = [2**k for k in range(0, int(np.log2(edges[-1])) + 1, 3)]
    panel.set_xticks(ticks, [f"{tick // 1024}k" if tick >= 1024 else str(tick) for tick in ticks])
    panel.xaxis.minorticks_off()
    panel.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
    panel.set_title(f"{what} by the length of their document", fontsize=9, color=INK, loc="left")
    panel.set_xlabel("tokens in the document", color=MUTED)
    panel.tick_params(colors=MUTED, labelsize=8)
    panel.grid(axis="y", color=GRID)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def _short(number: int) -> str:
    """A number as people say it: 512, 3.2M, 15B."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
