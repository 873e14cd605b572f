"""Show prepared data: a table and a plot of document lengths, and decoded samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from cat_lm.core.errors import UserError
from cat_lm.core.files import atomic_write
from cat_lm.data.corpus import TokenCorpus
from cat_lm.data.tokenizers import DocumentEncoder
from data_prep.check.integrity import document_ends

PICTURE = "document_lengths.png"
QUANTILES = {"min": 0, "25%": 0.25, "50%": 0.5, "75%": 0.75, "max": 1}
BINS_AN_OCTAVE = 2
BAR_WIDTH = 40
PIECES = 6  # number of pieces of a sample to show; documents and windows end a piece
PIECE_CHARACTERS = 160
GAP = " … "
# Colours of Okabe and Ito; the splits also differ in fill.
TRAIN, VALIDATION = "#0072b2", "#d55e00"


def count_lengths(corpus: TokenCorpus) -> pd.Series:
    """Return the number of documents of a split for each length in tokens, EOD included.

    Raises:
        UserError: the lengths do not add up to the tokens of the split.
    """
    of_shards = [
        pd.Series(np.diff(document_ends(shard), prepend=0)).value_counts()
        for shard in corpus.shards
    ]
    counts = pd.concat([pd.Series(dtype=int), *of_shards]).groupby(level=0).sum().astype(int)
    lengths = counts.index.to_numpy(dtype=np.int64)
    if (lengths < 1).any() or int(lengths @ counts.to_numpy()) != corpus.num_tokens:
        raise UserError(f"{corpus.folder}: the lengths of the {corpus.split} documents are damaged")
    return pd.Series(counts.to_numpy(), index=lengths)


def describe_lengths(counts: pd.Series) -> dict:
    """Return quantiles and mean of the lengths, and the number of documents in [2^k, 2^(k+1))."""
    if counts.empty:
        return {"quantiles": {}, "mean": None, "buckets": {}}
    running, total = counts.cumsum(), int(counts.sum())
    quantiles = {
        # The shortest length that this share of the documents does not exceed.
        name: int(counts.index[np.searchsorted(running, max(1, np.ceil(share * total)))])
        for name, share in QUANTILES.items()
    }
    buckets = counts.groupby(2 ** np.floor(np.log2(counts.index)).astype(int)).sum()
    mean = int(counts.index.to_numpy() @ counts.to_numpy()) / total
    return {
        "quantiles": quantiles,
        "mean": mean,
        "buckets": {int(k): int(n) for k, n in buckets.items()},
    }


def print_histogram(split: str, histogram: dict) -> None:
    """Print what `describe_lengths` returns."""
    if not histogram["buckets"]:
        print(f"\n{split}: no documents")
        return
    quantiles = ", ".join(f"{name} {value:,}" for name, value in histogram["quantiles"].items())
    print(f"\n{split}: tokens in a document: mean {histogram['mean']:,.0f}, {quantiles}")
    most = max(histogram["buckets"].values())
    for start, count in histogram["buckets"].items():
        bar = "#" * max(1, round(BAR_WIDTH * count / most))
        print(f"  from {start:>10,} {count:>12,} {bar}")


def draw_lengths(splits: Mapping[str, pd.Series], context_length: int, file: Path) -> None:
    """Write a PNG with the shares of documents and tokens by document length for each split."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    longest = max(int(counts.index[-1]) for counts in splits.values() if len(counts))
    octaves = np.log2(max(longest, context_length)) + 1
    edges = 2.0 ** (np.arange(0, np.ceil(octaves * BINS_AN_OCTAVE) + 1) / BINS_AN_OCTAVE)
    figure = Figure(figsize=(8.6, 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for panel, what in zip(panels, ("documents", "tokens"), strict=True):
        for split, counts in splits.items():
            if counts.empty:
                continue
            lengths, weights = counts.index.to_numpy(), counts.to_numpy()
            weights = weights if what == "documents" else weights * lengths
            shares, _ = np.histogram(lengths, edges, weights=weights / weights.sum())
            style = dict(fill=True, color=TRAIN, alpha=0.55)
            style = style if split == "train" else dict(color=VALIDATION, linewidth=1.6)
            panel.stairs(shares, edges, label=f"{split}: {counts.sum():,} documents", **style)
        label = f"context length {context_length:,}"
        panel.axvline(context_length, color="black", linewidth=1, linestyle="--", label=label)
        panel.set_xscale("log", base=2)
        panel.set(title=f"{what} by the length of their document", xlabel="tokens in the document")
        panel.grid(axis="y", alpha=0.4)
    panels[0].yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
    panels[0].set_ylabel("share")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    with atomic_write(file, "wb") as stream:
        figure.savefig(stream, format="png")


def print_samples(
    corpora: dict[str, TokenCorpus], encoder: DocumentEncoder, samples: int, context_length: int
) -> None:
    """Print evenly spaced documents of each split and windows of train."""
    for split, corpus in corpora.items():
        for index in _spaced_indices(corpus.num_documents, samples):
            start, stop = corpus.document(index)
            first, last = start // context_length, (stop - 1) // context_length
            windows = f"window {first:,}" if first == last else f"windows {first:,} to {last:,}"
            print(f"\n----- {split} document {index:,}: tokens {start:,} to {stop:,}, {windows}")
            print(_excerpt(corpus, encoder, start, stop, context_length))
    corpus = corpora["train"]
    for window in _spaced_indices(corpus.num_tokens // context_length, samples):
        start, stop = window * context_length, (window + 1) * context_length
        print(f"\n----- train window {window:,}: tokens {start:,} to {stop:,}")
        print(_excerpt(corpus, encoder, start, stop, context_length))
    if samples:
        print("-----")


def _spaced_indices(number: int, samples: int) -> Iterator[int]:
    count = min(number, samples)
    return (index * number // count for index in range(count))


def _excerpt(
    corpus: TokenCorpus, encoder: DocumentEncoder, start: int, stop: int, context_length: int
) -> str:
    """Return decoded tokens, with marks of window starts and document ends; long pieces are cut."""
    text = ""
    for number, (tokens, mark) in enumerate(_pieces(corpus, start, stop, context_length)):
        if number == PIECES:
            return f"{text} …"
        piece = encoder.decode(tokens)
        if len(piece) > PIECE_CHARACTERS + len(GAP):
            half = PIECE_CHARACTERS // 2
            piece = piece[:half] + GAP + piece[-half:]
        text += replace_control_characters(piece) + mark
    return text


def _pieces(
    corpus: TokenCorpus, start: int, stop: int, context_length: int
) -> Iterator[tuple[np.ndarray, str]]:
    while start < stop:
        mark = f"[window {start // context_length}]" if start % context_length == 0 else ""
        if mark:
            yield np.empty(0, int), mark
        end = min(stop, (start // context_length + 1) * context_length)
        tokens = corpus.tokens(start, end)
        begin = 0
        for eod in np.flatnonzero(tokens == corpus.eod_id).tolist():
            yield tokens[begin:eod], f"[EOD {corpus.eod_id}]\n"
            begin = eod + 1
        if begin < len(tokens):
            yield tokens[begin:], ""
        start = end


def replace_control_characters(text: str) -> str:
    """Return a text with control characters replaced, which would affect the terminal."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
